package storeproc

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
	"keelson.dev/keelson/raftstore/storetest/remote"
)

// runChild runs a replica process with the setup file at path, and returns its exit code.
func runChild(path string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	s, authority, err := readSetup(path)
	if err == nil {
		err = serveReplica(ctx, s, authority)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "replica process:", err)
		return 1
	}
	return 0
}

func serveReplica(ctx context.Context, s *setup, authority *storetest.Authority) error {
	server, client, err := authority.Issue(s.Name)
	if err != nil {
		return err
	}
	a := &adminServer{address: s.Address, tls: client, links: newLinks(s.Name, s.Links)}
	a.clock.Store(int64(s.Clock))
	port, err := listenPeers(ctx, s.Address)
	if err != nil {
		return err
	}
	c := replica.Config{
		Name: s.Name, Bootstrap: s.Bootstrap, Now: a.currentTime, Storage: replica.Storage{DataDir: s.DataDir},
		Network: replica.Network{
			Listener: &listener{Listener: port, links: a.links}, Advertise: s.Address,
			ServerTLS: server, ClientTLS: client, Dial: a.links.dial,
		},
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: s.Settings.LogLevel})),
	}
	s.Settings.applyTo(&c)
	if a.replica, err = replica.New(c); err != nil {
		port.Close()
		return err
	}
	socket, err := net.Listen("unix", s.Socket)
	if err != nil {
		port.Close()
		return err
	}
	g := grpc.NewServer(remote.ServerOptions()...)
	remote.Register(g, a.replica)
	storev1.RegisterAdminServer(g, a)
	var both errgroup.Group
	both.Go(func() error { return g.Serve(socket) })
	both.Go(func() error {
		defer g.Stop()
		return a.replica.Run(ctx)
	})
	return both.Wait()
}

// listenPeers listens on the peer port, which the parent process has reserved.
func listenPeers(ctx context.Context, address string) (net.Listener, error) {
	return (&net.ListenConfig{Control: reusePort}).Listen(ctx, "tcp", address)
}

// reusePort lets the parent process and a replica bind the same port.
func reusePort(_, _ string, c syscall.RawConn) error {
	var err error
	if failed := c.Control(func(fd uintptr) { err = setReusePort(int(fd)) }); failed != nil {
		return failed
	}
	return err
}

func setReusePort(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) }

// adminServer serves the parent process's operations on its replica.
type adminServer struct {
	storev1.UnimplementedAdminServer
	replica *replica.Replica
	address string
	tls     *tls.Config // of a replica as client
	links   *links
	clock   atomic.Int64 // a time.Duration
}

func (a *adminServer) currentTime() time.Time { return time.Now().Add(time.Duration(a.clock.Load())) }

func (a *adminServer) Status(context.Context, *storev1.AdminStatusRequest) (*storev1.AdminStatusResponse, error) {
	b, err := json.Marshal(a.replica.Status())
	if err != nil {
		return nil, remote.StatusOf(err)
	}
	return &storev1.AdminStatusResponse{Status: b, Ready: a.replica.Ready()}, nil
}

func (a *adminServer) Hash(ctx context.Context, _ *storev1.AdminHashRequest) (*storev1.AdminHashResponse, error) {
	// As a peer would request it: the peer service accepts only replicas.
	conn, err := grpc.NewClient("passthrough:///"+a.address, grpc.WithTransportCredentials(credentials.NewTLS(a.tls)),
		grpc.WithContextDialer(a.links.dial))
	if err != nil {
		return nil, remote.StatusOf(err)
	}
	defer conn.Close()
	state, err := storev1.NewPeerClient(conn).State(ctx, &storev1.StateRequest{Hash: true})
	if err != nil {
		return nil, err
	}
	return &storev1.AdminHashResponse{Revision: state.GetRevision(), Hash: state.GetHash()}, nil
}

func (a *adminServer) Snapshot(ctx context.Context, _ *storev1.AdminSnapshotRequest) (
	*storev1.AdminSnapshotResponse, error,
) {
	return new(storev1.AdminSnapshotResponse), remote.StatusOf(a.replica.Snapshot(ctx))
}

func (a *adminServer) Compact(ctx context.Context, req *storev1.AdminCompactRequest) (
	*storev1.AdminCompactResponse, error,
) {
	return new(storev1.AdminCompactResponse),
		remote.StatusOf(a.replica.Compact(ctx, raftstore.Revision(req.GetRevision())))
}

func (a *adminServer) Transfer(ctx context.Context, _ *storev1.AdminTransferRequest) (
	*storev1.AdminTransferResponse, error,
) {
	return new(storev1.AdminTransferResponse), remote.StatusOf(a.replica.TransferLeadership(ctx))
}

func (a *adminServer) AddMember(ctx context.Context, req *storev1.AddMemberRequest) (
	*storev1.AddMemberResponse, error,
) {
	return new(storev1.AddMemberResponse), remote.StatusOf(a.replica.AddMember(ctx, req.GetId(), req.GetAddress()))
}

func (a *adminServer) RemoveMember(ctx context.Context, req *storev1.RemoveMemberRequest) (
	*storev1.RemoveMemberResponse, error,
) {
	return new(storev1.RemoveMemberResponse), remote.StatusOf(a.replica.RemoveMember(ctx, req.GetId()))
}

func (a *adminServer) SetLinks(_ context.Context, req *storev1.AdminLinks) (*storev1.AdminLinksResponse, error) {
	peers := make(map[string]Link, len(req.GetLinks()))
	for _, l := range req.GetLinks() {
		if l.GetDelayUs() < 0 || l.GetJitterUs() < 0 {
			return nil, remote.StatusOf(fmt.Errorf("%w: link to %q: delay of %d µs and jitter of %d µs",
				raftstore.ErrInvalid, l.GetPeer(), l.GetDelayUs(), l.GetJitterUs()))
		}
		peers[l.GetPeer()] = Link{
			HoldSent: l.GetHoldSent(), HoldReceived: l.GetHoldReceived(),
			Delay:  time.Duration(l.GetDelayUs()) * time.Microsecond,
			Jitter: time.Duration(l.GetJitterUs()) * time.Microsecond,
		}
	}
	a.links.setPeers(peers)
	return new(storev1.AdminLinksResponse), nil
}

func (a *adminServer) SetClock(_ context.Context, req *storev1.AdminClock) (*storev1.AdminClockResponse, error) {
	a.clock.Store(int64(time.Duration(req.GetOffsetMs()) * time.Millisecond))
	return new(storev1.AdminClockResponse), nil
}
