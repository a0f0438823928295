package peernet

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
)

// MaxMessage is the maximum size of a gRPC message in bytes. A larger message would end the stream
// of all batches. The largest messages of this release are far smaller: a batch of one commit, and
// the outcomes of a forwarded batch. The rest is reserved for leaders of previous releases, because
// their outcomes contain the conflicting values.
const MaxMessage = 64 << 20

// peerWindow is the flow control window: how many unread bytes a peer may send. All batches that
// are forwarded at the same time fit. The window is fixed, so that gRPC sends no pings to measure
// the connection.
const peerWindow = 4 << 20

// PeerServerOptions returns the options of the gRPC server for other replicas.
func PeerServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.Creds(establishedTLS{}), grpc.MaxRecvMsgSize(MaxMessage), grpc.MaxSendMsgSize(MaxMessage),
		grpc.InitialWindowSize(peerWindow), grpc.InitialConnWindowSize(peerWindow),
	}
}

// Clients are the gRPC connections to the other replicas, by address. It is safe for concurrent
// use.
type Clients struct {
	tls     *tls.Config
	DialTCP func(ctx context.Context, address string) (net.Conn, error)

	mu     sync.Mutex
	conns  map[string]*grpc.ClientConn
	closed bool
}

func (p *Clients) Initialize(client *tls.Config, dial func(ctx context.Context, address string) (net.Conn, error)) {
	p.tls, p.DialTCP, p.conns = client, dial, make(map[string]*grpc.ClientConn)
}

func (p *Clients) Client(address string) (storev1.PeerClient, error) {
	conn, err := p.clientConn(address)
	if err != nil {
		return nil, err
	}
	return storev1.NewPeerClient(conn), nil
}

func (p *Clients) clientConn(address string) (*grpc.ClientConn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, raftstore.ErrClosed
	}
	conn := p.conns[address]
	if conn == nil {
		var err error
		conn, err = grpc.NewClient("passthrough:///"+address,
			grpc.WithTransportCredentials(credentials.NewTLS(p.tls.Clone())),
			grpc.WithContextDialer(p.DialTCP),
			grpc.WithInitialWindowSize(peerWindow), grpc.WithInitialConnWindowSize(peerWindow),
			grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage), grpc.MaxCallSendMsgSize(MaxMessage)),
			grpc.WithConnectParams(grpc.ConnectParams{
				Backoff: backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2,
					MaxDelay: 300 * time.Millisecond},
				MinConnectTimeout: time.Second,
			}),
		)
		if err != nil {
			return nil, fmt.Errorf("connecting to replica at %s: %w", address, err)
		}
		p.conns[address] = conn
	}
	return conn, nil
}

// AwaitBroken keeps a connection to the peer at address open. It returns nil when the connection
// breaks or cannot be established. It returns an error if ctx ends first.
func (p *Clients) AwaitBroken(ctx context.Context, address string) error {
	conn, err := p.clientConn(address)
	if err != nil {
		return err
	}
	for {
		state := conn.GetState()
		switch state {
		case connectivity.Idle:
			conn.Connect()
		case connectivity.TransientFailure, connectivity.Shutdown:
			return nil
		}
		if !conn.WaitForStateChange(ctx, state) {
			return ctx.Err()
		}
		if state == connectivity.Ready {
			return nil
		}
	}
}

func (p *Clients) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, c := range p.conns {
		c.Close()
	}
}
