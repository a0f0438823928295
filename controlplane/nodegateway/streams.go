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

// Limits for the streams and calls of one node on this replica, over all its connections. A
// half-sent message costs up to maxUp, and a stolen key must not allow any number of them.
const (
	// maxUp bounds a message from an agent. Its largest content is an object, at most
	// raftstore.MaxValueBytes (1.5 MiB). A CSI driver's response is at most 1 MiB.
	maxUp = 2 << 20
	// maxConnections bounds a node's connections. An agent has one; the rest is for lost
	// connections that were not detected yet, and for enrolments.
	maxConnections = 32
	// sessionStreams bounds a node's tunnels: one per exec, log or port-forward.
	sessionStreams = 4096
	// maxUnasked bounds the tunnels that wait for their first message, in excess of those
	// requested: an agent may open one late.
	maxUnasked = 32
	// callPatience is the timeout of a unary call. firstPatience is the timeout for the first
	// message of a stream, which agents send at once.
	callPatience  = 15 * time.Second
	firstPatience = 10 * time.Second
)

// streamLimits bounds the open streams of a node per method. All other methods share the limit
// fewCalls. An agent has one Session and one Standby; more belong to lost connections that were not
// detected yet.
var streamLimits = map[string]int{
	fleetv1.Fleet_Session_FullMethodName: 4,
	fleetv1.Fleet_Standby_FullMethodName: 4,
	fleetv1.Fleet_Tunnel_FullMethodName:  sessionStreams,
	fleetv1.Fleet_Review_FullMethodName:  maxReviews + 2, // Review itself returns the error for more
}

const fewCalls = 6

// places counts running operations per key. The zero value is ready to use.
type places[K comparable] struct {
	mu    sync.Mutex
	count map[K]int
}

type nodeMethod struct{ node, method string }

// enter counts one operation for k and returns the function that ends it. ok is false if limit
// operations are running.
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

// tap counts a new stream before any of its data is received, and until it ends. It returns an
// error if the node has too many.
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

// first returns the first message of a stream, or an error after firstPatience.
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
