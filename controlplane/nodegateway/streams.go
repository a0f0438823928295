package nodegateway

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// What one node may have under way at this replica, on all of its connections: a stream that is half sent costs up to
// maxUp, and whoever has stolen the node's key can half send as many as there may be.
const (
	// maxUp is above the largest message of an agent. What it says of its node and of its pods is to be stored, and no object
	// is stored that is larger than raftstore.MaxValueBytes, 1.5 MiB; a CSI driver's answer is 1 MiB.
	maxUp = 2 << 20
	// maxConnections is above the one that an agent has, those of before that have not been noticed to be gone, and the calls
	// by which it enrols anew.
	maxConnections = 32
	// sessionStreams is how many tunnels a node may have: one for each exec, log and port-forward.
	sessionStreams = 4096
	// maxUnasked is how many tunnels may wait for their first message beyond those that were asked for: some come late.
	maxUnasked = 32
	// callPatience is what a call may take that is no stream, and firstPatience what the first message of a stream may:
	// agents send it at once.
	callPatience  = 15 * time.Second
	firstPatience = 10 * time.Second
)

// streamLimits are how many there may be of each method; of all others together there may be fewCalls. An agent has one
// Session and one Standby here: others are of connections that have ended and were not noticed to.
var streamLimits = map[string]int{
	fleetv1.Fleet_Session_FullMethodName: 4,
	fleetv1.Fleet_Standby_FullMethodName: 4,
	fleetv1.Fleet_Tunnel_FullMethodName:  sessionStreams,
	fleetv1.Fleet_Review_FullMethodName:  maxReviews + 2, // who has more is told so by Review
}

const fewCalls = 6

// places counts what is under way for each key. The zero value is ready to use.
type places[K comparable] struct {
	mu    sync.Mutex
	count map[K]int
}

type nodeMethod struct{ node, method string }

// enter takes a place; leave gives it back. ok is false when all are taken.
func (p *places[K]) enter(k K, limit int) (leave func(), ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.count[k] >= limit {
		return nil, false
	}
	if p.count == nil {
		p.count = make(map[K]int)
	}
	p.count[k]++
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.count[k]--; p.count[k] == 0 {
			delete(p.count, k)
		}
	}, true
}

// tap lets a stream in before anything of it is received, and holds its place until it has ended.
func (s *Server) tap(ctx context.Context, info *tap.Info) (context.Context, error) {
	node, err := nodeOf(ctx)
	if err != nil {
		return nil, err
	}
	k, limit := nodeMethod{node, info.FullMethodName}, fewCalls
	if n, ok := streamLimits[k.method]; ok {
		limit = n
	} else {
		k.method = ""
	}
	leave, ok := s.underWay.enter(k, limit)
	if !ok {
		return nil, status.Errorf(codes.ResourceExhausted, "fleet: node %s has %d streams of %s under way: it tries again", node,
			limit, info.FullMethodName)
	}
	end := func() {}
	switch k.method {
	case fleetv1.Fleet_Session_FullMethodName, fleetv1.Fleet_Standby_FullMethodName, fleetv1.Fleet_Tunnel_FullMethodName:
	default:
		ctx, end = context.WithTimeout(ctx, callPatience)
	}
	context.AfterFunc(ctx, func() { end(); leave() })
	return ctx, nil
}

// first is the first message of a stream.
func first[M any](s *Server, stream interface{ Recv() (M, error) }) (M, error) {
	type message struct {
		m   M
		err error
	}
	came := make(chan message, 1)
	s.children.Go(func() { // ends with the stream
		m, err := stream.Recv()
		came <- message{m, err}
	})
	patience := time.NewTimer(firstPatience)
	defer patience.Stop()
	select {
	case got := <-came:
		return got.m, got.err
	case <-patience.C:
		var none M
		return none, status.Errorf(codes.DeadlineExceeded, "fleet: the first message did not come within %s", firstPatience)
	}
}
