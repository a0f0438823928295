package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// setup is the first line that a replica process reads.
type setup struct {
	Name, Dir, Address string
	Bootstrap          bool
	Authority          []byte
}

// order is each later line; its reply is one line too.
type order struct {
	Do       string // "add", "status", "load", "times", "reads"
	ID       string
	Address  string
	Clients  int
	Size     int
	Duration time.Duration
	Prefix   string
	Count    int
}

type reply struct {
	Error  string
	Leader string
	Ready  bool
	Micros []uint32 // latencies, or for "times" unix microseconds modulo 2^32
	Gap    float64  // load: the longest time without a reply, in seconds
	Failed int
	Took   float64
}

// serveReplica runs a replica and obeys orders until stdin ends.
func serveReplica(ctx context.Context, in io.Reader, out io.Writer) error {
	lines := json.NewDecoder(bufio.NewReader(in))
	var s setup
	if err := lines.Decode(&s); err != nil {
		return err
	}
	authority, err := storetest.ParseAuthority(s.Authority)
	if err != nil {
		return err
	}
	server, client, err := authority.Issue(s.Name)
	if err != nil {
		return err
	}
	r, err := replica.New(replica.Config{
		Name: s.Name, DataDir: s.Dir, ListenAddr: s.Address, Advertise: s.Address, Bootstrap: s.Bootstrap,
		ServerTLS: server, ClientTLS: client,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	go func() {
		defer cancel()
		replies := json.NewEncoder(out)
		for {
			var o order
			if lines.Decode(&o) != nil {
				return
			}
			if replies.Encode(obey(ctx, r, o)) != nil {
				return
			}
		}
	}()
	return <-ended
}

func obey(ctx context.Context, r *replica.Replica, o order) reply {
	switch o.Do {
	case "add":
		ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
		defer cancel()
		if err := r.AddMember(ctx, o.ID, o.Address); err != nil {
			return reply{Error: err.Error()}
		}
		return reply{}
	case "status":
		return reply{Leader: r.Status().Leader, Ready: r.Ready()}
	case "load":
		return load(ctx, o, func(ctx context.Context, client, n int, value []byte) error {
			_, err := r.Commit(ctx, raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(fmt.Sprintf("/bench/%s/%d/%d", o.Prefix, client, n%100), value)}})
			return err
		})
	case "reads":
		return load(ctx, o, func(ctx context.Context, client, n int, _ []byte) error {
			_, _, err := r.Get(ctx, fmt.Sprintf("/bench/%s/%d/%d", o.Prefix, client, n%100), raftstore.ReadOptions{})
			if errors.Is(err, raftstore.ErrNotFound) {
				return nil
			}
			return err
		})
	case "times":
		return arrivals(ctx, r, o)
	case "paced":
		return paced(ctx, r, o)
	}
	return reply{Error: "unknown order " + o.Do}
}

// load runs clients in a closed loop for a time.
func load(ctx context.Context, o order, call func(ctx context.Context, client, n int, value []byte) error) reply {
	value := make([]byte, o.Size)
	began := time.Now()
	until := began.Add(o.Duration)
	var (
		mu   sync.Mutex
		out  reply
		last = began
		wg   sync.WaitGroup
	)
	for c := range o.Clients {
		wg.Add(1)
		go func() {
			defer wg.Done()
			var mine []uint32
			for n := 0; time.Now().Before(until) && ctx.Err() == nil; n++ {
				sent := time.Now()
				callCtx, cancel := context.WithTimeout(ctx, 20*time.Second)
				err := call(callCtx, c, n, value)
				cancel()
				now := time.Now()
				mine = append(mine, uint32(now.Sub(sent).Microseconds()))
				mu.Lock()
				if err != nil {
					out.Failed++
					out.Error = err.Error()
				}
				out.Gap = max(out.Gap, now.Sub(last).Seconds())
				last = now
				mu.Unlock()
			}
			mu.Lock()
			out.Micros = append(out.Micros, mine...)
			mu.Unlock()
		}()
	}
	wg.Wait()
	out.Took = time.Since(began).Seconds()
	return out
}

// arrivals notes when each of the next revisions under a prefix arrives by watch.
func arrivals(ctx context.Context, r *replica.Replica, o order) reply {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	w, err := r.Watch(ctx, o.Prefix, 0)
	if err != nil {
		return reply{Error: err.Error()}
	}
	defer w.Stop()
	var out reply
	for len(out.Micros) < o.Count {
		ev, open := <-w.C()
		if !open {
			return reply{Error: "watch ended"}
		}
		if len(ev.Events) > 0 {
			out.Micros = append(out.Micros, uint32(time.Now().UnixMicro()))
		}
	}
	return out
}

// paced commits at a slow pace and notes when each was acknowledged.
func paced(ctx context.Context, r *replica.Replica, o order) reply {
	var out reply
	tick := time.NewTicker(o.Duration)
	defer tick.Stop()
	for n := range o.Count {
		<-tick.C
		if _, err := r.Commit(ctx, raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(fmt.Sprintf("%s%d", o.Prefix, n), nil)}}); err != nil {
			return reply{Error: err.Error()}
		}
		out.Micros = append(out.Micros, uint32(time.Now().UnixMicro()))
	}
	return out
}
