package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime/pprof"
	"time"

	"google.golang.org/grpc"

	"keelson.dev/keelson/internal/gcroom"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
	"keelson.dev/keelson/raftstore/storetest/remote"
	"keelson.dev/keelson/test/bench/store/drive"
)

// serveMember runs a replica with clients in its process, as the apiserver has
// it, and a door for clients of other processes.
func serveMember(ctx context.Context, s drive.Setup, lines *drive.Lines) error {
	authority, err := storetest.ParseAuthority(s.Authority)
	if err != nil {
		return err
	}
	server, client, err := authority.Issue(s.Name)
	if err != nil {
		return err
	}
	r, err := replica.New(replica.Config{
		Name: s.Name, DataDir: s.Dir, ListenAddr: s.Peer, Advertise: s.Peer, Bootstrap: s.Bootstrap,
		ServerTLS: server, ClientTLS: client, LogStore: replica.LogStoreKind(s.LogStore),
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go gcroom.Run(ctx, gcroom.Server) // as keelson-controlplane does
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	door, err := net.Listen("tcp", s.Door)
	if err != nil {
		return fmt.Errorf("door of replica %s: %w", s.Name, err)
	}
	gate := grpc.NewServer(remote.ServerOptions()...)
	remote.Register(gate, r)
	defer gate.Stop()
	go func() {
		if gate.Serve(door) != nil {
			cancel()
		}
	}()
	engine := drive.NewEngine([]drive.Door{{Member: s.Name, Target: target{r, r.Backup}}})
	go func() {
		defer cancel()
		lines.Serve(ctx, os.Stdout, func(ctx context.Context, o drive.Order) drive.Reply { return obeyMember(ctx, r, engine, o) })
	}()
	return <-ended
}

func obeyMember(ctx context.Context, r *replica.Replica, engine *drive.Engine, o drive.Order) drive.Reply {
	var err error
	switch o.Do {
	case drive.DoStatus:
		s := r.Status()
		return drive.Reply{Leader: s.Leader, Term: s.Term, Ready: r.Ready()}
	case drive.DoAdd:
		ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
		defer cancel()
		err = r.AddMember(ctx, o.Member, o.Address)
	case drive.DoTransfer:
		err = r.TransferLeadership(ctx)
	case drive.DoSnapshot:
		began := time.Now()
		if err = r.Snapshot(ctx); err == nil {
			return drive.Reply{Took: time.Since(began).Seconds()}
		}
	case drive.DoProfile:
		err = profile(ctx, o.Address, engine.Begin(o.ID))
	default:
		return engine.Obey(ctx, o)
	}
	if err != nil {
		return drive.Fail(err)
	}
	return drive.Reply{}
}

// profile writes a CPU profile until it is ended.
func profile(ctx context.Context, path string, ended <-chan struct{}) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := pprof.StartCPUProfile(f); err != nil {
		return err
	}
	select {
	case <-ended:
	case <-ctx.Done():
	}
	pprof.StopCPUProfile()
	return f.Close()
}

// target is a store as the benchmark's clients see it.
type target struct {
	raftstore.Store
	backup func(ctx context.Context, w io.Writer) error // nil = not through this store
}

func (t target) Put(ctx context.Context, keys []string, values [][]byte) error {
	ops := make([]raftstore.Op, len(keys))
	for i, k := range keys {
		ops[i] = raftstore.Put(k, values[i])
	}
	_, err := t.Commit(ctx, raftstore.Commit{Ops: ops})
	return err
}

func (t target) Get(ctx context.Context, key string) error {
	_, _, err := t.Store.Get(ctx, key, raftstore.ReadOptions{})
	return err
}

func (t target) List(ctx context.Context, prefix string) (keys int, bytes int64, err error) {
	l, err := t.Store.List(ctx, prefix, raftstore.ListOptions{})
	if err != nil {
		return 0, 0, err
	}
	for _, i := range l.Items {
		bytes += int64(len(i.Key) + len(i.Value))
	}
	return len(l.Items), bytes, nil
}

func (t target) Watch(ctx context.Context, prefix string, seen func(value []byte)) error {
	w, err := t.Store.Watch(ctx, prefix, 0)
	if err != nil {
		return err
	}
	go func() {
		defer w.Stop()
		for got := range w.C() {
			for _, e := range got.Events {
				if e.Kind == raftstore.EventPut {
					seen(e.Item.Value)
				}
			}
		}
	}()
	return nil
}

func (t target) Backup(ctx context.Context) (int64, error) {
	if t.backup == nil {
		return 0, errors.New("there is no backup through this door")
	}
	var n counter
	err := t.backup(ctx, &n)
	return int64(n), err
}

// counter counts what is written to it.
type counter int64

func (c *counter) Write(b []byte) (int, error) {
	*c += counter(len(b))
	return len(b), nil
}
