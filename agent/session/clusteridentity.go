package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/internal/clusterid"
	"keelson.dev/keelson/internal/safepath"
)

// An agent stores the latest identity of its cluster. The identity contains the incarnation, a
// number that increases when the cluster is recovered or restored from a backup. The agent refuses
// replicas with an earlier incarnation, because the recovery or restore has abandoned them. It
// leaves a session with such a replica as soon as another replica presents a later incarnation.

const (
	identityFile        = "cluster-identity.json"
	identityFileVersion = 1
	maxIdentityFile     = 64 << 10
)

// identityRecord is the JSON content of identityFile. Later releases may add fields.
type identityRecord struct {
	Version     int    `json:"version"`
	Cluster     string `json:"cluster"`
	Incarnation uint64 `json:"incarnation"`
}

// clusterIdentity is the latest identity of the agent's cluster, in memory and in identityFile.
type clusterIdentity struct {
	file string

	mu      sync.Mutex
	latest  clusterid.Identity
	changed chan struct{} // closed and replaced when latest changes
}

func newClusterIdentity(dir string) *clusterIdentity {
	return &clusterIdentity{file: filepath.Join(dir, identityFile), changed: make(chan struct{})}
}

// loadRecord loads the cluster identity that an earlier agent process stored in identityFile. If
// the file does not exist, it returns nil and the identity stays empty.
func (c *clusterIdentity) loadRecord() error {
	data, err := safepath.ReadFile(c.file, maxIdentityFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var rec identityRecord
	if err == nil {
		err = json.Unmarshal(data, &rec)
	}
	if err != nil {
		return fmt.Errorf("read the identity of the cluster: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.latest = clusterid.Identity{Cluster: rec.Cluster, Incarnation: rec.Incarnation}
	return nil
}

// latestIdentity returns the latest identity of the cluster, and a channel that is closed when that
// identity changes.
func (c *clusterIdentity) latestIdentity() (clusterid.Identity, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.latest, c.changed
}

// checkReplica compares the identity in md, the gRPC metadata of a replica, with the latest
// identity. It stores an identity that is later, or of another cluster, in memory and in
// identityFile. It returns an error for an earlier identity, or if identityFile cannot be written.
// A replica without an identity in its metadata runs an earlier release and is accepted.
func (c *clusterIdentity) checkReplica(md metadata.MD, replica string) error {
	theirs, sent := identityFromMetadata(md)
	if !sent {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case theirs == c.latest:
		return nil
	case theirs.Before(c.latest):
		return status.Error(codes.FailedPrecondition,
			(&clusterid.AbandonedError{Replica: replica, Newest: c.latest}).Error())
	}
	raw, err := json.Marshal(identityRecord{identityFileVersion, theirs.Cluster, theirs.Incarnation})
	if err == nil {
		err = writeFile(c.file, raw)
	}
	if err != nil { // without the stored identity, the agent could connect to an abandoned replica after a restart
		return fmt.Errorf("record the identity of the cluster: %w", err)
	}
	c.latest = theirs
	close(c.changed)
	c.changed = make(chan struct{})
	return nil
}

func identityFromMetadata(md metadata.MD) (clusterid.Identity, bool) {
	for _, text := range md.Get(clusterid.Key) {
		if i, err := clusterid.Parse(text); err == nil && i.Cluster != "" {
			return i, true
		}
	}
	return clusterid.Identity{}, false
}

// withIdentityMetadata adds the latest cluster identity, if it is known, to the gRPC metadata of an
// outgoing call.
func (c *clusterIdentity) withIdentityMetadata(ctx context.Context) context.Context {
	if latest, _ := c.latestIdentity(); latest.Cluster != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, clusterid.Key, latest.String())
	}
	return ctx
}

// interceptStream is a grpc.StreamClientInterceptor. It sends the cluster identity to the replica.
// The first RecvMsg of the stream returns an error, and no message, if checkReplica refuses the
// replica's identity.
func (c *clusterIdentity) interceptStream(ctx context.Context, desc *grpc.StreamDesc,
	conn *grpc.ClientConn, method string,
	next grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	s, err := next(c.withIdentityMetadata(ctx), desc, conn, method, opts...)
	if err != nil {
		return nil, err
	}
	return &identityCheckingStream{ClientStream: s, cluster: c, replica: conn.Target()}, nil
}

// interceptUnary is a grpc.UnaryClientInterceptor. It sends the cluster identity to the replica,
// and returns an error if checkReplica refuses the replica's identity.
func (c *clusterIdentity) interceptUnary(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn,
	next grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	var md metadata.MD
	if err := next(c.withIdentityMetadata(ctx), method, req, reply, conn, append(opts, grpc.Header(&md))...); err !=
		nil {
		return err
	}
	return c.checkReplica(md, conn.Target())
}

type identityCheckingStream struct {
	grpc.ClientStream
	cluster *clusterIdentity
	replica string
	checked bool // not locked: one goroutine at a time calls RecvMsg
}

// RecvMsg receives a message. The first call also checks the replica's identity, and fails if
// checkReplica refuses it.
func (s *identityCheckingStream) RecvMsg(m any) error {
	if err := s.ClientStream.RecvMsg(m); err != nil || s.checked {
		return err
	}
	md, err := s.Header()
	if err == nil {
		err = s.cluster.checkReplica(md, s.replica)
	}
	s.checked = err == nil
	return err
}

// awaitLaterIdentity waits until the latest cluster identity is later than the identity in md, the
// metadata of the session's replica. It then returns a clusterid.AbandonedError, because a recovery
// or restore has abandoned that replica. It returns nil if ctx ends first.
func (c *clusterIdentity) awaitLaterIdentity(ctx context.Context, md metadata.MD, replica string) error {
	theirs, sent := identityFromMetadata(md)
	for {
		latest, changed := c.latestIdentity()
		if sent && theirs.Before(latest) {
			return &clusterid.AbandonedError{Replica: replica, Newest: latest}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}
