// The steps with franz-go.  GROUP_PROTOCOL=consumer has groups by KIP-848.
package main

import (
	"context"
	"errors"
	"os"

	"clients/steps"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

var background = context.Background()

type client struct{ address string }

func main() {
	steps.Run(func(address string) steps.Client { return client{address} })
}

func (c client) open(options ...kgo.Opt) (*kgo.Client, error) {
	return kgo.NewClient(append(options, kgo.SeedBrokers(c.address))...)
}

func member(topic, group string) []kgo.Opt {
	options := []kgo.Opt{
		kgo.ConsumeTopics(topic),
		kgo.ConsumerGroup(group),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.DisableAutoCommit(),
	}
	if os.Getenv("GROUP_PROTOCOL") == "consumer" {
		options = append(options, kgo.ServerSideBalancer())
	}
	return options
}

func (c client) withAdmin(work func(admin *kadm.Client) error) error {
	connected, err := c.open()
	if err != nil {
		return err
	}
	defer connected.Close()
	return work(kadm.NewClient(connected))
}

func (c client) Create(topic string, partitions int) error {
	return c.withAdmin(func(admin *kadm.Client) error {
		configs := map[string]*string{"retention.ms": kadm.StringPtr("1234567")}
		_, err := admin.CreateTopic(background, int32(partitions), 1, configs, topic)
		return err
	})
}

func (c client) Produce(topic, codec string, records []steps.Record) error {
	compression := map[string]kgo.CompressionCodec{
		"none":   kgo.NoCompression(),
		"gzip":   kgo.GzipCompression(),
		"snappy": kgo.SnappyCompression(),
		"lz4":    kgo.Lz4Compression(),
		"zstd":   kgo.ZstdCompression(),
	}[codec]
	producer, err := c.open(kgo.ProducerBatchCompression(compression))
	if err != nil {
		return err
	}
	defer producer.Close()
	var sent []*kgo.Record
	for _, each := range records {
		record := &kgo.Record{Topic: topic, Key: []byte(each.Key)}
		if each.Value != nil {
			record.Value = []byte(*each.Value)
			record.Headers = []kgo.RecordHeader{{Key: "n", Value: []byte(*each.Header)}}
		}
		sent = append(sent, record)
	}
	return producer.ProduceSync(background, sent...).FirstErr()
}

func (c client) Consume(topic, group string, count int) error {
	consumer, err := c.open(member(topic, group)...)
	if err != nil {
		return err
	}
	defer consumer.Close()
	for count > 0 {
		fetches := consumer.PollRecords(background, count)
		if err := fetches.Err(); err != nil {
			return err
		}
		for _, record := range fetches.Records() {
			count--
			printed := steps.Record{
				Partition: record.Partition,
				Offset:    record.Offset,
				Key:       string(record.Key),
				Value:     steps.Text(record.Value),
			}
			for _, header := range record.Headers {
				printed.Header = steps.Text(header.Value)
			}
			steps.Print(printed)
		}
		if err := consumer.CommitRecords(background, fetches.Records()...); err != nil {
			return err
		}
	}
	return nil
}

func (c client) Transfer(source, group, target string, count int) error {
	options := append(member(source, group), kgo.SeedBrokers(c.address))
	options = append(options, kgo.TransactionalID(group+"-transfer"))
	session, err := kgo.NewGroupTransactSession(options...)
	if err != nil {
		return err
	}
	defer session.Close()
	for count > 0 {
		fetches := session.PollRecords(background, count)
		if err := errors.Join(fetches.Err(), session.Begin()); err != nil {
			return err
		}
		for _, each := range fetches.Records() {
			session.Produce(background, &kgo.Record{Topic: target, Key: each.Key, Value: each.Value}, nil)
		}
		committed, err := session.End(background, kgo.TryCommit)
		if err != nil {
			return err
		}
		if committed {
			count -= len(fetches.Records())
		}
	}
	if err := session.Begin(); err != nil {
		return err
	}
	aborted := &kgo.Record{Topic: target, Value: []byte("aborted")}
	if err := session.ProduceSync(background, aborted).FirstErr(); err != nil {
		return err
	}
	_, err = session.End(background, kgo.TryAbort)
	return err
}

func (c client) Describe(topic, group string) (found steps.Description, err error) {
	err = c.withAdmin(func(admin *kadm.Client) error {
		topics, failed := admin.ListTopics(background, topic)
		ends, failedEnds := admin.ListEndOffsets(background, topic)
		groups, failedList := admin.ListGroups(background)
		described, failedGroup := admin.DescribeGroups(background, group)
		offsets, failedOffsets := admin.FetchOffsets(background, group)
		configs, failedConfigs := admin.DescribeTopicConfigs(background, topic)
		failed = errors.Join(failed, failedEnds, failedList, failedGroup, failedOffsets, failedConfigs)
		if failed != nil {
			return failed
		}
		found.Partitions = len(topics[topic].Partitions)
		ends.Each(func(each kadm.ListedOffset) { found.Ends = append(found.Ends, each.Offset) })
		found.Groups, found.State = groups.Groups(), described[group].State
		offsets.Each(func(each kadm.OffsetResponse) { found.Committed = append(found.Committed, each.At) })
		_, failed = configs.On(topic, func(each *kadm.ResourceConfig) error {
			for _, config := range each.Configs {
				if config.Key == "retention.ms" {
					found.Retention = config.MaybeValue()
				}
			}
			return each.Err
		})
		return failed
	})
	return found, err
}

func (c client) Delete(topic, group string) error {
	return c.withAdmin(func(admin *kadm.Client) error {
		groups, failedGroups := admin.DeleteGroups(background, group)
		topics, failedTopics := admin.DeleteTopics(background, topic)
		return errors.Join(failedGroups, failedTopics, groups.Error(), topics.Error())
	})
}
