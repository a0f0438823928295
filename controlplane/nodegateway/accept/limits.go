package accept

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	"keelson.dev/keelson/controlplane/nodegateway/wire"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Limits of the streams and calls of one node on this replica, over all its connections. A message
// that is not completely received needs up to maxAgentMessage of memory, and a stolen key must not
// allow an unlimited number of them.
const (
	// maxAgentMessage is the maximum size of a message from an agent. Its largest content is an
	// object, at most raftstore.MaxValueBytes (1.5 MiB). A CSI driver's response has at most 1 MiB.
	maxAgentMessage = 2 << 20
	// maxConnections is the maximum number of a node's connections. An agent has one. The others
	// are for lost connections that were not detected yet, and for enrollments.
	maxConnections = 32
	// maxTunnels is the maximum number of a node's tunnels. Each exec, log or port-forward uses
	// one.
	maxTunnels = 4096
	// callTimeout is the timeout of a unary call.
	callTimeout = 15 * time.Second
)

// streamLimits is the maximum number of open streams of a node by method. All other methods share
// the limit maxOtherCalls. An agent has one Session and one Standby; the others are lost
// connections that were not detected yet.
var streamLimits = map[string]int{
	fleetv1.Fleet_Session_FullMethodName: 4,
	fleetv1.Fleet_Standby_FullMethodName: 4,
	fleetv1.Fleet_Tunnel_FullMethodName:  maxTunnels,
	fleetv1.Fleet_Review_FullMethodName:  maxReviews + 2, // Review itself returns the error above maxReviews
}

const maxOtherCalls = 6

// operationLimiter counts the running operations of each key. The zero value is ready to use.
type operationLimiter[K comparable] struct {
	mu    sync.Mutex
	count map[K]int
}

type nodeMethod struct{ node, method string }

// startOperation counts one running operation of the key k until end is called. ok is false if
// limit operations of k are running.
func (l *operationLimiter[K]) startOperation(k K, limit int) (end func(), ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.count[k] >= limit {
		return nil, false
	}
	if l.count == nil {
		l.count = make(map[K]int)
	}
	l.count[k]++
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.count[k]--; l.count[k] == 0 {
			delete(l.count, k)
		}
	}, true
}

// limitStream counts a stream from before its first data until it ends. It returns an error if the
// node has too many streams.
func (a *Acceptor) limitStream(ctx context.Context, info *tap.Info) (context.Context, error) {
	node, err := wire.CallerNode(ctx)
	if err != nil {
		return nil, err
	}
	k, limit := nodeMethod{node, info.FullMethodName}, maxOtherCalls
	if n, ok := streamLimits[k.method]; ok {
		limit = n
	} else {
		k.method = ""
	}
	end, ok := a.openStreams.startOperation(k, limit)
	if !ok {
		return nil, status.Errorf(codes.ResourceExhausted, "fleet: node %s has %d open streams of %s: try again later",
			node,
			limit, info.FullMethodName)
	}
	cancel := func() {}
	switch k.method {
	case fleetv1.Fleet_Session_FullMethodName, fleetv1.Fleet_Standby_FullMethodName,
		fleetv1.Fleet_Tunnel_FullMethodName:
	default:
		ctx, cancel = context.WithTimeout(ctx, callTimeout)
	}
	context.AfterFunc(ctx, func() { cancel(); end() })
	return ctx, nil
}
