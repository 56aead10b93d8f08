// A mount of a directory that behaves as NFS does on a client: `remote_disk MOUNT SOURCE`.
//
// The server checks the permissions of the calling user; a file that the server's host deletes gives ESTALE to a client
// that has it open; a client keeps names for a second; locks are its own.  To delete a file at a known moment, set the
// sticky bit of it: its second half cannot be read, because it is deleted when a client gets there.
#define FUSE_USE_VERSION 31
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/fsuid.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

static const char *source;

// The calls of libc change all threads; there is only one, but they would also end its right to change back.
static void become(uid_t user, gid_t group, int count, gid_t *groups) {
  syscall(SYS_setgroups, count, groups);
  setfsgid(group);
  setfsuid(user);
}

static int as_server(int result) {
  int error = errno;
  become(0, 0, 0, NULL);
  return result == -1 ? -error : result;
}

static void as_caller(void) {
  gid_t groups[64];
  int count = fuse_getgroups(64, groups);
  struct fuse_context *caller = fuse_get_context();
  become(caller->uid, caller->gid, count > 0 && count <= 64 ? count : 0, groups);
}

// Names the file of the server, and does something with it as the calling user.
#define ON(path, call)                                  \
  char full[4096];                                      \
  snprintf(full, sizeof full, "%s%s", source, path);    \
  as_caller();                                          \
  return as_server(call)

static int is_stale(int fd) {
  struct stat status;
  return fstat(fd, &status) || status.st_nlink == 0;
}

static void *init(struct fuse_conn_info *connection, struct fuse_config *config) {
  config->use_ino = config->hard_remove = 1;
  config->entry_timeout = 1;
  config->attr_timeout = config->negative_timeout = 0;
  umask(0);
  return NULL;
}

static int get_attributes(const char *path, struct stat *status, struct fuse_file_info *file) {
  if (file) return is_stale(file->fh) ? -ESTALE : fstat(file->fh, status) ? -errno : 0;
  ON(path, lstat(full, status));
}

static int check_access(const char *path, int mode) { ON(path, faccessat(AT_FDCWD, full, mode, AT_EACCESS)); }

static int read_directory(const char *path, void *buffer, fuse_fill_dir_t fill, off_t offset,
                          struct fuse_file_info *file, enum fuse_readdir_flags flags) {
  char full[4096];
  snprintf(full, sizeof full, "%s%s", source, path);
  as_caller();
  DIR *directory = opendir(full);
  int result = as_server(directory ? 0 : -1);
  if (result) return result;
  for (struct dirent *entry; (entry = readdir(directory));) {
    struct stat status = {.st_ino = entry->d_ino, .st_mode = entry->d_type << 12};
    fill(buffer, entry->d_name, &status, 0, 0);
  }
  closedir(directory);
  return 0;
}

static int make_directory(const char *path, mode_t mode) { ON(path, mkdir(full, mode)); }
static int remove_file(const char *path) { ON(path, unlink(full)); }
static int remove_directory(const char *path) { ON(path, rmdir(full)); }
static int change_mode(const char *path, mode_t mode, struct fuse_file_info *file) { ON(path, chmod(full, mode)); }
static int truncate_file(const char *path, off_t size, struct fuse_file_info *file) { ON(path, truncate(full, size)); }
static int get_space(const char *path, struct statvfs *space) { ON(path, statvfs(full, space)); }

static int rename_file(const char *path, const char *target, unsigned flags) {
  char new_path[4096];
  snprintf(new_path, sizeof new_path, "%s%s", source, target);
  ON(path, rename(full, new_path));
}

static int open_file(const char *path, struct fuse_file_info *file) {
  ON(path, (int)(file->fh = open(full, file->flags)) < 0 ? -1 : 0);
}

static int create_file(const char *path, mode_t mode, struct fuse_file_info *file) {
  ON(path, (int)(file->fh = open(full, file->flags, mode)) < 0 ? -1 : 0);
}

static int read_file(const char *path, char *buffer, size_t size, off_t offset, struct fuse_file_info *file) {
  struct stat status;
  if (is_stale(file->fh)) return -ESTALE;
  fstat(file->fh, &status);
  if (status.st_mode & S_ISVTX && offset >= status.st_size / 2) {
    char full[4096];
    snprintf(full, sizeof full, "%s%s", source, path);
    unlink(full);
    return -ESTALE;
  }
  ssize_t count = pread(file->fh, buffer, size, offset);
  return count < 0 ? -errno : count;
}

static int write_file(const char *path, const char *bytes, size_t size, off_t offset, struct fuse_file_info *file) {
  if (is_stale(file->fh)) return -ESTALE;
  ssize_t count = pwrite(file->fh, bytes, size, offset);
  return count < 0 ? -errno : count;
}

static int close_file(const char *path, struct fuse_file_info *file) { return close(file->fh) ? -errno : 0; }

static const struct fuse_operations operations = {
    .init = init, .getattr = get_attributes, .access = check_access, .readdir = read_directory,
    .mkdir = make_directory, .unlink = remove_file, .rmdir = remove_directory, .rename = rename_file,
    .chmod = change_mode, .truncate = truncate_file, .open = open_file, .create = create_file,
    .read = read_file, .write = write_file, .statfs = get_space, .release = close_file,
};

int main(int count, char **arguments) {
  source = arguments[2];
  char *options[] = {arguments[0], arguments[1], "-s", "-o", "allow_other"};
  return fuse_main(5, options, &operations, NULL);
}
