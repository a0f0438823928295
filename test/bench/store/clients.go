package main

import (
	"context"
	"fmt"
	"os"

	"google.golang.org/grpc/credentials/insecure"

	"keelson.dev/keelson/raftstore/storetest/remote"
	"keelson.dev/keelson/test/bench/store/drive"
)

// serveClients serves the requests for loads that the parent process sends. Its clients call
// replicas over gRPC, from this process.
func serveClients(ctx context.Context, s drive.Setup, lines *drive.RequestReader) error {
	var connections []drive.Connection
	for range s.Conns { // one connection to each member per pass, so that clients are spread evenly
		for _, m := range s.Members {
			c, err := remote.Dial(ctx, m.Address, insecure.NewCredentials())
			if err != nil {
				return fmt.Errorf("connecting to replica %s: %w", m.Member, err)
			}
			defer c.Close()
			connections = append(connections, drive.Connection{Member: m.Member, Target: storeTarget{Store: c}})
		}
	}
	engine := drive.NewEngine(connections)
	lines.ServeRequests(ctx, os.Stdout, func(ctx context.Context, o drive.Request) drive.Reply {
		if o.Do == drive.DoProfile {
			return executeProfileRequest(ctx, engine, o)
		}
		return engine.ExecuteRequest(ctx, o)
	})
	return nil
}

// The two locations of clients.
const (
	inProcess = "in process" // in the replicas' processes, like the API server
	overGRPC  = "over gRPC"  // in their own process, like etcd's clients
)

// variant is one of the compared alternatives: a group of members of Keelson or etcd, and the
// location of its clients.
type variant struct {
	*group
	at string
}

func (a variant) String() string {
	if a.isReference() {
		return a.name
	}
	return a.name + " " + a.at
}

func (a variant) isReference() bool { return a.name == nameOfEtcd }

// pendingRequests is one request that was sent to one or more processes and is in progress.
type pendingRequests []*pendingRequest

// sendRequest sends a request for a load to the clients of the members through. Clients in process
// are in the members' own processes, so the clients of the load are split among the members.
func (a variant) sendRequest(o drive.Request, through []*member) (pendingRequests, error) {
	if a.at != inProcess {
		o.Through = names(through)
		w, err := a.load.sendRequest(o)
		return pendingRequests{w}, err
	}
	if len(through) > o.Clients && o.Clients > 0 {
		through = through[:o.Clients]
	}
	var out pendingRequests
	for i, m := range through {
		part := o
		part.Clients = splitEvenly(o.Clients, len(through), i)
		if o.Prefix == "" {
			part.Prefix = m.setup.Name // so that no two clients share keys
		}
		w, err := m.sendRequest(part)
		if err != nil {
			return out, err
		}
		out = append(out, w)
	}
	return out, nil
}

// splitEvenly returns the size of part i of n, if n is split into parts of nearly equal size.
func splitEvenly(n, parts, i int) int { return (n + parts - 1 - i) / parts }

// awaitReply returns the merged replies of all processes.
func (c pendingRequests) awaitReply(ctx context.Context) (drive.Reply, error) {
	return c.gatherReplies(func(w *pendingRequest) (drive.Reply, error) { return w.awaitReply(ctx) })
}

// stopLoad stops the load in all processes and returns the merged replies.
func (c pendingRequests) stopLoad(ctx context.Context) (drive.Reply, error) {
	return c.gatherReplies(func(w *pendingRequest) (drive.Reply, error) { return w.stopLoad(ctx) })
}

func (c pendingRequests) gatherReplies(reply func(*pendingRequest) (drive.Reply, error)) (drive.Reply, error) {
	var all drive.Reply
	for _, w := range c {
		r, err := reply(w)
		if err != nil {
			return all, err
		}
		all = mergeReplies(all, r)
	}
	return all, nil
}

// mergeReplies merges the replies of two processes to one request.
func mergeReplies(a, b drive.Reply) drive.Reply {
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

// runLoad sends a request for a load to the clients of the members through, and waits for the
// merged reply. It returns an error if calls failed.
func (a variant) runLoad(ctx context.Context, o drive.Request, through []*member) (drive.Reply, error) {
	c, err := a.sendRequest(o, through)
	if err != nil {
		return drive.Reply{}, err
	}
	r, err := c.awaitReply(ctx)
	if err == nil && r.Failed > 0 {
		err = fmt.Errorf("%s: %d calls of %s failed; the first: %s", a, r.Failed, o.Do, r.Error)
	}
	return r, err
}
