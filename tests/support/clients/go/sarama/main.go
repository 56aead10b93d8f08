// The steps with sarama.
package main

import (
	"context"
	"errors"

	"clients/steps"

	"github.com/IBM/sarama"
)

type client struct{ address string }

func main() {
	steps.Run(func(address string) steps.Client { return client{address} })
}

func config() *sarama.Config {
	config := sarama.NewConfig()
	config.Version = sarama.MaxVersion
	config.Producer.Idempotent = true
	config.Producer.RequiredAcks = sarama.WaitForAll
	config.Producer.Return.Successes = true
	config.Net.MaxOpenRequests = 1
	config.Consumer.Return.Errors = true
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	config.Consumer.Offsets.AutoCommit.Enable = false
	config.Consumer.IsolationLevel = sarama.ReadCommitted
	return config
}

func (c client) withAdmin(work func(admin sarama.ClusterAdmin) error) error {
	admin, err := sarama.NewClusterAdmin([]string{c.address}, config())
	if err != nil {
		return err
	}
	return errors.Join(work(admin), admin.Close())
}

func (c client) Create(topic string, partitions int) error {
	return c.withAdmin(func(admin sarama.ClusterAdmin) error {
		retention := "1234567"
		detail := &sarama.TopicDetail{
			NumPartitions:     int32(partitions),
			ReplicationFactor: 1,
			ConfigEntries:     map[string]*string{"retention.ms": &retention},
		}
		return admin.CreateTopic(topic, detail, false)
	})
}

func (c client) Produce(topic, codec string, records []steps.Record) error {
	configured := config()
	if err := configured.Producer.Compression.UnmarshalText([]byte(codec)); err != nil {
		return err
	}
	producer, err := sarama.NewSyncProducer([]string{c.address}, configured)
	if err != nil {
		return err
	}
	var sent []*sarama.ProducerMessage
	for _, each := range records {
		message := &sarama.ProducerMessage{Topic: topic, Key: sarama.StringEncoder(each.Key)}
		if each.Value != nil {
			message.Value = sarama.StringEncoder(*each.Value)
			message.Headers = []sarama.RecordHeader{{Key: []byte("n"), Value: []byte(*each.Header)}}
		}
		sent = append(sent, message)
	}
	return errors.Join(producer.SendMessages(sent), producer.Close())
}

// What a member does with each record, until it has had `left` of them.
type handler struct {
	handle   func(*sarama.ConsumerMessage)
	done     func(sarama.ConsumerGroupSession) error
	messages chan *sarama.ConsumerMessage
	left     int
	failed   error
	stop     context.CancelFunc
}

func (h *handler) Setup(session sarama.ConsumerGroupSession) error {
	h.messages = make(chan *sarama.ConsumerMessage)
	messages := h.messages
	go func() {
		for h.left > 0 {
			select {
			case message := <-messages:
				h.left--
				h.handle(message)
				session.MarkMessage(message, "")
			case <-session.Context().Done():
				return
			}
		}
		h.failed = h.done(session)
		h.stop()
	}()
	return nil
}

func (h *handler) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (h *handler) ConsumeClaim(session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for {
		select {
		case message := <-claim.Messages():
			select {
			case h.messages <- message:
			case <-session.Context().Done():
				return nil
			}
		case <-session.Context().Done():
			return nil
		}
	}
}

func (c client) consume(topic, group string, handler *handler) error {
	member, err := sarama.NewConsumerGroup([]string{c.address}, group, config())
	if err != nil {
		return err
	}
	running, stop := context.WithCancel(context.Background())
	handler.stop = stop
	for running.Err() == nil && err == nil {
		err = member.Consume(running, []string{topic}, handler)
	}
	return errors.Join(handler.failed, err, member.Close())
}

func (c client) Consume(topic, group string, count int) error {
	return c.consume(topic, group, &handler{
		left: count,
		handle: func(message *sarama.ConsumerMessage) {
			printed := steps.Record{
				Partition: message.Partition,
				Offset:    message.Offset,
				Key:       string(message.Key),
				Value:     steps.Text(message.Value),
			}
			for _, header := range message.Headers {
				printed.Header = steps.Text(header.Value)
			}
			steps.Print(printed)
		},
		done: func(session sarama.ConsumerGroupSession) error {
			session.Commit()
			return nil
		},
	})
}

func (c client) Transfer(source, group, target string, count int) error {
	configured := config()
	configured.Producer.Transaction.ID = group + "-transfer"
	producer, err := sarama.NewSyncProducer([]string{c.address}, configured)
	if err != nil {
		return err
	}
	var copied []*sarama.ConsumerMessage
	transfer := func(session sarama.ConsumerGroupSession) error {
		if err := producer.BeginTxn(); err != nil {
			return err
		}
		metadata := sarama.NewConsumerGroupMetadata(group)
		metadata.MemberID, metadata.GenerationID = session.MemberID(), session.GenerationID()
		for _, each := range copied {
			message := &sarama.ProducerMessage{
				Topic: target,
				Key:   sarama.ByteEncoder(each.Key),
				Value: sarama.ByteEncoder(each.Value),
			}
			_, _, sent := producer.SendMessage(message)
			added := producer.AddMessageToTxnWithGroupMetadata(each, metadata, nil)
			if err := errors.Join(sent, added); err != nil {
				return err
			}
		}
		if err := errors.Join(producer.CommitTxn(), producer.BeginTxn()); err != nil {
			return err
		}
		aborted := &sarama.ProducerMessage{Topic: target, Value: sarama.StringEncoder("aborted")}
		_, _, err := producer.SendMessage(aborted)
		return errors.Join(err, producer.AbortTxn())
	}
	err = c.consume(source, group, &handler{
		left:   count,
		handle: func(message *sarama.ConsumerMessage) { copied = append(copied, message) },
		done:   transfer,
	})
	return errors.Join(err, producer.Close())
}

func (c client) Describe(topic, group string) (found steps.Description, err error) {
	err = c.withAdmin(func(admin sarama.ClusterAdmin) error {
		topics, failed := admin.DescribeTopics([]string{topic})
		if failed != nil {
			return failed
		}
		found.Partitions = len(topics[0].Partitions)
		newest := map[int32]int64{}
		for _, each := range topics[0].Partitions {
			newest[each.ID] = sarama.OffsetNewest
		}
		ends, failedEnds := admin.ListOffsets(map[string]map[int32]int64{topic: newest}, nil)
		groups, failedList := admin.ListConsumerGroups()
		described, failedGroup := admin.DescribeConsumerGroups([]string{group})
		offsets, failedOffsets := admin.ListConsumerGroupOffsets(group, nil)
		resource := sarama.ConfigResource{
			Type: sarama.TopicResource, Name: topic, ConfigNames: []string{"retention.ms"},
		}
		configs, failedConfigs := admin.DescribeConfig(resource)
		failed = errors.Join(failedEnds, failedList, failedGroup, failedOffsets, failedConfigs)
		if failed != nil {
			return failed
		}
		for _, each := range ends[topic] {
			found.Ends = append(found.Ends, each.Offset)
		}
		for name := range groups {
			found.Groups = append(found.Groups, name)
		}
		for _, each := range offsets.Blocks[topic] {
			found.Committed = append(found.Committed, each.Offset)
		}
		found.State, found.Retention = described[0].State, configs[0].Value
		return nil
	})
	return found, err
}

func (c client) Delete(topic, group string) error {
	return c.withAdmin(func(admin sarama.ClusterAdmin) error {
		return errors.Join(admin.DeleteConsumerGroup(group), admin.DeleteTopic(topic))
	})
}
