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

// serveMember runs a replica with clients in its process, like the API server, and a listener for
// clients of other processes.
func serveMember(ctx context.Context, s drive.Setup, lines *drive.RequestReader) error {
	authority, err := storetest.ParseAuthority(s.Authority)
	if err != nil {
		return err
	}
	server, client, err := authority.Issue(s.Name)
	if err != nil {
		return err
	}
	heard := new(installCounter)
	r, err := replica.New(replica.Config{
		Name: s.Name, Bootstrap: s.Bootstrap, CompareEvery: s.CompareEvery,
		Network:   replica.Network{ListenAddr: s.Peer, Advertise: s.Peer, ServerTLS: server, ClientTLS: client},
		Storage:   replica.Storage{DataDir: s.Dir, LogStore: disk.LogStoreKind(s.LogStore)},
		Snapshots: replica.Snapshots{SnapshotBytes: s.SnapshotBytes, TrailingBytes: s.SnapshotBytes},
		Logger:    slog.New(heard),
	})
	if err != nil {
		return err
	}
	ctx, cancel := signal.NotifyContext(ctx, syscall.SIGTERM) // for an orderly shutdown, like a daemon
	defer cancel()
	go gcheadroom.Run(ctx, gcheadroom.ServerHeadroom, memory.ReleaseUnused) // like keelson-controlplane
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	listener, err := net.Listen("tcp", s.ClientAddress)
	if err != nil {
		return fmt.Errorf("client listener of replica %s: %w", s.Name, err)
	}
	gate := grpc.NewServer(remote.ServerOptions()...)
	remote.Register(gate, r)
	defer gate.Stop()
	go func() {
		if gate.Serve(listener) != nil {
			cancel()
		}
	}()
	engine := drive.NewEngine([]drive.Connection{{Member: s.Name, Target: storeTarget{r, r.Backup}}})
	go func() {
		defer cancel()
		lines.ServeRequests(ctx, os.Stdout, func(ctx context.Context, o drive.Request) drive.Reply {
			return executeMemberRequest(ctx, r, heard, engine, o)
		})
	}()
	return <-ended
}

func executeMemberRequest(
	ctx context.Context, r *replica.Replica, heard *installCounter, engine *drive.Engine, o drive.Request,
) drive.Reply {
	var err error
	switch o.Do {
	case drive.DoStatus:
		s := r.Status()
		return drive.Reply{Leader: s.Leader, Term: s.Term, Ready: r.Ready()}
	case drive.DoApplied:
		return drive.Reply{Applied: r.Status().AppliedIndex}
	case drive.DoMeters:
		return drive.Reply{Meters: replicaMeters(r, heard)}
	case drive.DoCollect:
		return drive.CollectGarbage()
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
		return executeProfileRequest(ctx, engine, o)
	default:
		return engine.ExecuteRequest(ctx, o)
	}
	if err != nil {
		return drive.ErrorReply(err)
	}
	return drive.Reply{}
}

// replicaMeters returns the metrics of a replica: its counters and its memory. received counts
// the snapshots that it has installed.
func replicaMeters(r *replica.Replica, received *installCounter) map[string]float64 {
	out := drive.RuntimeMeters()
	out[drive.MeterInstalled] = float64(received.seen.Load())
	registry := prometheus.NewRegistry()
	registry.MustRegister(r.Collector())
	families, err := registry.Gather()
	if err != nil {
		return out // a missing metric is detected where it is used
	}
	names := map[string]string{"keelson_store_comparisons_total": drive.MeterCompared,
		"keelson_store_comparison_seconds": drive.MeterCompareSeconds}
	for _, f := range families {
		if name, ok := names[f.GetName()]; ok {
			m := f.GetMetric()[0]
			out[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue() // it is either a counter or a gauge
		}
	}
	return out
}

// installCounter is a log handler that counts the snapshots installed from a leader. The replica's
// own counter includes the snapshots that it has written itself.
type installCounter struct{ seen atomic.Int64 }

// Enabled implements slog.Handler.
func (*installCounter) Enabled(_ context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo
}

// Handle implements slog.Handler.
func (h *installCounter) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "Installed remote snapshot" {
		h.seen.Add(1)
	}
	return nil
}

// WithAttrs implements slog.Handler.
func (h *installCounter) WithAttrs([]slog.Attr) slog.Handler { return h }

// WithGroup implements slog.Handler.
func (h *installCounter) WithGroup(string) slog.Handler { return h }

func executeProfileRequest(ctx context.Context, engine *drive.Engine, o drive.Request) drive.Reply {
	if err := writeProfile(ctx, o.Address, engine.RegisterRequest(o.ID)); err != nil {
		return drive.ErrorReply(err)
	}
	return drive.Reply{}
}

// writeProfile writes a CPU profile to path until ended is closed or ctx ends.
func writeProfile(ctx context.Context, path string, ended <-chan struct{}) error {
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

// storeTarget implements drive.Target on a store.
type storeTarget struct {
	raftstore.Store
	backup func(ctx context.Context, w io.Writer) error // nil = not supported
}

func (t storeTarget) Put(ctx context.Context, keys []string, values [][]byte) error {
	ops := make([]raftstore.Op, len(keys))
	for i, k := range keys {
		ops[i] = raftstore.Put(k, values[i])
	}
	_, err := t.Commit(ctx, raftstore.Commit{Ops: ops})
	return err
}

func (t storeTarget) Get(ctx context.Context, key string) error {
	_, _, err := t.Store.Get(ctx, key, raftstore.ReadOptions{})
	return err
}

func (t storeTarget) List(ctx context.Context, prefix string) (keys int, bytes int64, err error) {
	l, err := t.Store.List(ctx, prefix, raftstore.ListOptions{})
	if err != nil {
		return 0, 0, err
	}
	for _, i := range l.Items {
		bytes += int64(len(i.Key) + len(i.Value))
	}
	return len(l.Items), bytes, nil
}

func (t storeTarget) Watch(ctx context.Context, prefix string, seen func(value []byte)) error {
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

func (t storeTarget) Backup(ctx context.Context) (int64, error) {
	if t.backup == nil {
		return 0, errors.New("this connection does not support backups")
	}
	var n byteCounter
	err := t.backup(ctx, &n)
	return int64(n), err
}

// byteCounter is an io.Writer that counts the bytes written to it.
type byteCounter int64

func (c *byteCounter) Write(b []byte) (int, error) {
	*c += byteCounter(len(b))
	return len(b), nil
}
