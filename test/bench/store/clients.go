package main

import (
	"context"
	"fmt"
	"os"

	"google.golang.org/grpc/credentials/insecure"

	"keelson.dev/keelson/raftstore/storetest/remote"
	"keelson.dev/keelson/test/bench/store/drive"
)

// serveClients makes load on replicas from a process of its own, over gRPC.
func serveClients(ctx context.Context, s drive.Setup, lines *drive.Lines) error {
	var doors []drive.Door
	for range s.Conns { // one to each member, then the next: clients in turn are spread evenly
		for _, m := range s.Members {
			c, err := remote.Dial(ctx, m.Address, insecure.NewCredentials())
			if err != nil {
				return fmt.Errorf("connecting to replica %s: %w", m.Member, err)
			}
			defer c.Close()
			doors = append(doors, drive.Door{Member: m.Member, Target: target{Store: c}})
		}
	}
	engine := drive.NewEngine(doors)
	lines.Serve(ctx, os.Stdout, func(ctx context.Context, o drive.Order) drive.Reply {
		if o.Do == drive.DoProfile {
			return obeyProfile(ctx, engine, o)
		}
		return engine.Obey(ctx, o)
	})
	return nil
}

// The two places of clients.
const (
	inProcess = "in process" // in the replicas' processes, as the apiserver is
	overGRPC  = "over gRPC"  // in a process of their own, as etcd's are
)

// arm is one of those that are measured by turns: a group, and where its clients are.
type arm struct {
	*group
	at string
}

func (a arm) String() string {
	if a.isReference() {
		return a.name
	}
	return a.name + " " + a.at
}

func (a arm) isReference() bool { return a.name == nameOfEtcd }

// call is an order under way, perhaps at several processes.
type call []*pending

// begin gives an order to clients of some members. In process, each member's
// clients are in its own process: the order is shared out among them.
func (a arm) begin(o drive.Order, through []*member) (call, error) {
	if a.at != inProcess {
		o.Through = names(through)
		w, err := a.load.begin(o)
		return call{w}, err
	}
	if len(through) > o.Clients && o.Clients > 0 {
		through = through[:o.Clients]
	}
	var out call
	for i, m := range through {
		part := o
		part.Clients = share(o.Clients, len(through), i)
		if o.Prefix == "" {
			part.Prefix = m.setup.Name // no two clients share keys
		}
		w, err := m.begin(part)
		if err != nil {
			return out, err
		}
		out = append(out, w)
	}
	return out, nil
}

// share is the i-th part of a number split as evenly as can be.
func share(n, parts, i int) int { return (n + parts - 1 - i) / parts }

// wait returns what all of them have seen together.
func (c call) wait(ctx context.Context) (drive.Reply, error) {
	return c.gather(func(w *pending) (drive.Reply, error) { return w.wait(ctx) })
}

// end ends loads and returns what they have seen together.
func (c call) end(ctx context.Context) (drive.Reply, error) {
	return c.gather(func(w *pending) (drive.Reply, error) { return w.end(ctx) })
}

func (c call) gather(reply func(*pending) (drive.Reply, error)) (drive.Reply, error) {
	var all drive.Reply
	for _, w := range c {
		r, err := reply(w)
		if err != nil {
			return all, err
		}
		all = merge(all, r)
	}
	return all, nil
}

// merge joins what two processes have seen of one order.
func merge(a, b drive.Reply) drive.Reply {
	a.Micros = append(a.Micros, b.Micros...)
	a.Acks = append(a.Acks, b.Acks...)
	a.Arrivals = append(a.Arrivals, b.Arrivals...)
	a.Failed += b.Failed
	a.Keys += b.Keys
	a.Bytes += b.Bytes
	a.Took = max(a.Took, b.Took)
	if a.Error == "" {
		a.Error = b.Error
	}
	return a
}

// do gives an order and waits. Calls that failed are an error.
func (a arm) do(ctx context.Context, o drive.Order, through []*member) (drive.Reply, error) {
	c, err := a.begin(o, through)
	if err != nil {
		return drive.Reply{}, err
	}
	r, err := c.wait(ctx)
	if err == nil && r.Failed > 0 {
		err = fmt.Errorf("%s: %d calls of %s failed; the first: %s", a, r.Failed, o.Do, r.Error)
	}
	return r, err
}
