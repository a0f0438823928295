package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime/pprof"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"keelson.dev/keelson/internal/gcheadroom"
	"keelson.dev/keelson/internal/memory"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
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
	heard := new(installs)
	r, err := replica.New(replica.Config{
		Name: s.Name, DataDir: s.Dir, ListenAddr: s.Peer, Advertise: s.Peer, Bootstrap: s.Bootstrap,
		ServerTLS: server, ClientTLS: client, LogStore: disk.LogStoreKind(s.LogStore), CompareEvery: s.CompareEvery,
		SnapshotBytes: s.SnapshotBytes, TrailingBytes: s.SnapshotBytes,
		Logger: slog.New(heard),
	})
	if err != nil {
		return err
	}
	ctx, cancel := signal.NotifyContext(ctx, syscall.SIGTERM) // to end in an orderly way, as a daemon
	defer cancel()
	go gcheadroom.Run(ctx, gcheadroom.ServerHeadroom, memory.ReleaseUnused) // as keelson-controlplane does
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
		lines.Serve(ctx, os.Stdout, func(ctx context.Context, o drive.Order) drive.Reply { return obeyMember(ctx, r, heard, engine, o) })
	}()
	return <-ended
}

func obeyMember(ctx context.Context, r *replica.Replica, heard *installs, engine *drive.Engine, o drive.Order) drive.Reply {
	var err error
	switch o.Do {
	case drive.DoStatus:
		s := r.Status()
		return drive.Reply{Leader: s.Leader, Term: s.Term, Ready: r.Ready()}
	case drive.DoApplied:
		return drive.Reply{Applied: r.Status().AppliedIndex}
	case drive.DoMeters:
		return drive.Reply{Meters: meters(r, heard)}
	case drive.DoCollect:
		return drive.Collect()
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
		return obeyProfile(ctx, engine, o)
	default:
		return engine.Obey(ctx, o)
	}
	if err != nil {
		return drive.Fail(err)
	}
	return drive.Reply{}
}

// meters are what a replica counts, and its memory.
func meters(r *replica.Replica, heard *installs) map[string]float64 {
	out := drive.RuntimeMeters()
	out[drive.MeterInstalled] = float64(heard.seen.Load())
	registry := prometheus.NewRegistry()
	registry.MustRegister(r.Collector())
	families, err := registry.Gather()
	if err != nil {
		return out // what is not there is missed by who needs it
	}
	names := map[string]string{"keelson_store_comparisons_total": drive.MeterCompared, "keelson_store_comparison_seconds": drive.MeterCompareSeconds}
	for _, f := range families {
		if name, ok := names[f.GetName()]; ok {
			m := f.GetMetric()[0]
			out[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue() // it has one of both
		}
	}
	return out
}

// installs counts the snapshots that raft says it has taken in from a leader:
// a replica's own counter has those that it wrote itself too.
type installs struct{ seen atomic.Int64 }

// Enabled implements slog.Handler.
func (*installs) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelInfo }

// Handle implements slog.Handler.
func (h *installs) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "Installed remote snapshot" {
		h.seen.Add(1)
	}
	return nil
}

// WithAttrs implements slog.Handler.
func (h *installs) WithAttrs([]slog.Attr) slog.Handler { return h }

// WithGroup implements slog.Handler.
func (h *installs) WithGroup(string) slog.Handler { return h }

func obeyProfile(ctx context.Context, engine *drive.Engine, o drive.Order) drive.Reply {
	if err := profile(ctx, o.Address, engine.Begin(o.ID)); err != nil {
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
