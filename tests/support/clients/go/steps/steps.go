// Package steps is the command line of a client: client_programs.py says what each step does.
package steps

import (
	"encoding/json"
	"fmt"
	"os"
	"strconv"
)

// Record is what a consumer prints, and what a producer sends.
type Record struct {
	Partition int32   `json:"partition"`
	Offset    int64   `json:"offset"`
	Key       string  `json:"key"`
	Value     *string `json:"value"`
	Header    *string `json:"header"`
}

// Description is what an admin client says of a topic and a group.
type Description struct {
	Partitions int      `json:"partitions"`
	Ends       []int64  `json:"ends"`
	Groups     []string `json:"groups"`
	State      string   `json:"state"`
	Committed  []int64  `json:"committed"`
	Retention  string   `json:"retention"`
}

// Client takes the steps.
type Client interface {
	Create(topic string, partitions int) error
	Produce(topic, codec string, records []Record) error
	Consume(topic, group string, count int) error
	Transfer(source, group, target string, count int) error
	Describe(topic, group string) (Description, error)
	Delete(topic, group string) error
}

// Text is a pointer to a text; nil for no bytes at all.
func Text(bytes []byte) *string {
	if bytes == nil {
		return nil
	}
	text := string(bytes)
	return &text
}

// Print prints a value as a line of JSON.
func Print(value any) {
	line, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	fmt.Println(string(line))
}

// Run takes the step that the arguments of this program name.
func Run(open func(address string) Client) {
	client, step, given := open(os.Args[1]), os.Args[2], os.Args[3:]
	var err error
	switch step {
	case "create":
		err = client.Create(given[0], number(given[1]))
	case "produce":
		err = client.Produce(given[0], given[1], records(number(given[2]), number(given[3])))
	case "consume":
		err = client.Consume(given[0], given[1], number(given[2]))
	case "transfer":
		err = client.Transfer(given[0], given[1], given[2], number(given[3]))
	case "describe":
		var found Description
		if found, err = client.Describe(given[0], given[1]); err == nil {
			Print(found)
		}
	case "delete":
		err = client.Delete(given[0], given[1])
	default:
		err = fmt.Errorf("there is no step %s", step)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func number(text string) int {
	value, err := strconv.Atoi(text)
	if err != nil {
		panic(err)
	}
	return value
}

func records(first, end int) []Record {
	var all []Record
	for n := first; n < end; n++ {
		text := strconv.Itoa(n)
		all = append(all, Record{Key: "k" + text, Value: &text, Header: &text})
	}
	return append(all, Record{Key: "k" + strconv.Itoa(end)})
}
