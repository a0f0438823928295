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

// An agent records the latest incarnation of its cluster. It refuses replicas of an earlier
// incarnation, which a recovery or restore has abandoned, and leaves its session with such a
// replica when another replica shows a later incarnation.

const (
	identityFile        = "cluster-identity.json"
	identityFileVersion = 1
	maxIdentityFile     = 64 << 10
)

// identityRecord is what identityFile holds. Later releases may add fields.
type identityRecord struct {
	Version     int    `json:"version"`
	Cluster     string `json:"cluster"`
	Incarnation uint64 `json:"incarnation"`
}

// clusterIdentity is the latest identity of the agent's cluster.
type clusterIdentity struct {
	file string

	mu      sync.Mutex
	latest  clusterid.Identity
	changed chan struct{} // closed and replaced when latest changes
}

func newClusterIdentity(dir string) *clusterIdentity {
	return &clusterIdentity{file: filepath.Join(dir, identityFile), changed: make(chan struct{})}
}

// load reads the record; a missing file is no error.
func (c *clusterIdentity) load() error {
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

// get returns the latest identity and a channel that is closed when it changes.
func (c *clusterIdentity) get() (clusterid.Identity, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.latest, c.changed
}

// meet compares the identity that a replica sent with the latest one, and records it when it is
// later or of another cluster. A replica that sent no identity is of a release that has none: it
// is accepted.
func (c *clusterIdentity) meet(md metadata.MD, replica string) error {
	theirs, sent := identityOf(md)
	if !sent {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case theirs == c.latest:
		return nil
	case theirs.Before(c.latest):
		return status.Error(codes.FailedPrecondition, (&clusterid.AbandonedError{Replica: replica, Newest: c.latest}).Error())
	}
	raw, err := json.Marshal(identityRecord{identityFileVersion, theirs.Cluster, theirs.Incarnation})
	if err == nil {
		err = writeFile(c.file, raw)
	}
	if err != nil { // a session without the record could go to an abandoned replica after a restart
		return fmt.Errorf("record the identity of the cluster: %w", err)
	}
	c.latest = theirs
	close(c.changed)
	c.changed = make(chan struct{})
	return nil
}

func identityOf(md metadata.MD) (clusterid.Identity, bool) {
	for _, text := range md.Get(clusterid.Key) {
		if i, err := clusterid.Parse(text); err == nil && i.Cluster != "" {
			return i, true
		}
	}
	return clusterid.Identity{}, false
}

// outgoing adds the latest identity to the metadata of a call.
func (c *clusterIdentity) outgoing(ctx context.Context) context.Context {
	if latest, _ := c.get(); latest.Cluster != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, clusterid.Key, latest.String())
	}
	return ctx
}

// stream is a grpc.StreamClientInterceptor that compares identities before the first message is
// delivered.
func (c *clusterIdentity) stream(ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string,
	next grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	s, err := next(c.outgoing(ctx), desc, conn, method, opts...)
	if err != nil {
		return nil, err
	}
	return &comparedStream{ClientStream: s, cluster: c, replica: conn.Target()}, nil
}

// call is a grpc.UnaryClientInterceptor that compares identities.
func (c *clusterIdentity) call(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn,
	next grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	var md metadata.MD
	if err := next(c.outgoing(ctx), method, req, reply, conn, append(opts, grpc.Header(&md))...); err != nil {
		return err
	}
	return c.meet(md, conn.Target())
}

type comparedStream struct {
	grpc.ClientStream
	cluster  *clusterIdentity
	replica  string
	compared bool // RecvMsg is called by one goroutine at a time
}

// RecvMsg implements grpc.ClientStream.
func (s *comparedStream) RecvMsg(m any) error {
	if err := s.ClientStream.RecvMsg(m); err != nil || s.compared {
		return err
	}
	md, err := s.Header()
	if err == nil {
		err = s.cluster.meet(md, s.replica)
	}
	s.compared = err == nil
	return err
}

// awaitLaterIdentity returns an error when the replica of a session has an earlier identity than
// the latest one; nil when ctx has ended.
func (c *clusterIdentity) awaitLaterIdentity(ctx context.Context, md metadata.MD, replica string) error {
	theirs, sent := identityOf(md)
	for {
		latest, changed := c.get()
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
