package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"keelson.dev/keelson/test/bench/etcd/drive"
)

// serveLoad serves the requests for loads that the parent process sends. The loads use etcd's own
// client.
func serveLoad(ctx context.Context, s drive.Setup, orders *drive.RequestReader) error {
	var connections []drive.Connection
	for range s.Conns { // one connection to each member per pass, so that clients are spread evenly
		for _, m := range s.Members {
			c, err := clientv3.New(clientv3.Config{Endpoints: []string{m.Address}, DialTimeout: 5 * time.Second,
				Logger: zap.NewNop()})
			if err != nil {
				return fmt.Errorf("connecting to member %s at %s: %w", m.Member, m.Address, err)
			}
			defer c.Close()
			connections = append(connections, drive.Connection{Member: m.Member, Target: target{c}})
		}
	}
	orders.ServeRequests(ctx, os.Stdout, drive.NewEngine(connections).ExecuteRequest)
	return nil
}

// target implements drive.Target on etcd.
type target struct{ c *clientv3.Client }

func (t target) Put(ctx context.Context, keys []string, values [][]byte) error {
	if len(keys) == 1 {
		_, err := t.c.Put(ctx, keys[0], string(values[0]))
		return err
	}
	ops := make([]clientv3.Op, len(keys))
	for i, k := range keys {
		ops[i] = clientv3.OpPut(k, string(values[i]))
	}
	_, err := t.c.Txn(ctx).Then(ops...).Commit()
	return err
}

func (t target) Get(ctx context.Context, key string) error {
	got, err := t.c.Get(ctx, key)
	if err == nil && len(got.Kvs) == 0 {
		err = fmt.Errorf("key %s does not exist", key)
	}
	return err
}

func (t target) List(ctx context.Context, prefix string) (keys int, bytes int64, err error) {
	got, err := t.c.Get(ctx, prefix, clientv3.WithPrefix())
	if err != nil {
		return 0, 0, err
	}
	for _, kv := range got.Kvs {
		bytes += int64(len(kv.Key) + len(kv.Value))
	}
	return len(got.Kvs), bytes, nil
}

func (t target) Watch(ctx context.Context, prefix string, seen func(value []byte)) error {
	events := t.c.Watch(ctx, prefix, clientv3.WithPrefix(), clientv3.WithCreatedNotify())
	first, open := <-events
	if !open {
		return errors.New("the watch ended before its first event")
	}
	if err := first.Err(); err != nil {
		return err
	}
	go func() {
		for got := range events {
			for _, e := range got.Events {
				seen(e.Kv.Value)
			}
		}
	}()
	return nil
}

func (t target) Backup(ctx context.Context) (int64, error) {
	r, err := t.c.Snapshot(ctx)
	if err != nil {
		return 0, err
	}
	defer r.Close()
	return io.Copy(io.Discard, r)
}
