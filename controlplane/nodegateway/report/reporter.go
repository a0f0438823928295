// Package report writes what agents report to the API, with the identity of the reporting node:
// statuses of nodes and pods, Events, and CSI drivers. It also keeps in memory the reports that are
// not stored: heartbeats and usage.
package report

import (
	"context"
	"crypto/x509"
	"fmt"
	"log/slog"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/nodegateway/wire"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// maxConcurrentWrites is the maximum number of concurrent writes of one Reporter.
const maxConcurrentWrites = 16

// Objects provides the objects in the informer caches. They are shared and must not be modified.
type Objects interface {
	Pod(namespace, name string) (*v1.Pod, bool)
	Node(name string) (*v1.Node, bool)
}

// Session is the session on which a node reports.
type Session interface {
	// QueueMessage queues a message to the agent. It does not block.
	QueueMessage(m *fleetv1.ControlMessage)
	// End ends the session with the error err as the cause.
	End(err error)
}

// Config is the configuration that all Reporters of a replica share. All fields except Timeline are
// required.
type Config struct {
	Lifetime *wire.Lifetime
	Client   *client.Client // must have no user set; a Reporter acts as its node
	Objects  Objects
	CSINodes cache.Indexer
	Events   *EventIndex
	Timeline *api.Timeline // receives the stages that agents measure; may be nil
	// IsRevoked reads the revocation record of a node from the store, and reports whether it covers
	// the certificate.
	IsRevoked func(ctx context.Context, node string, cert *x509.Certificate) (bool, error)
	// OwnLease makes a newly created Node the owner of its Lease.
	OwnLease func(ctx context.Context, node *v1.Node)
	Log      *slog.Logger
}

// Reporter writes the reports of one node while it has a session. Its methods are safe for
// concurrent use, and only CloseAndWait waits for a write. Create it with NewReporter.
type Reporter struct {
	cfg     *Config
	session Session
	log     *slog.Logger
	node    string
	cert    *x509.Certificate // the client certificate of the node
	api     *client.Client    // acts as the node
	writes  *writeQueue
	clock   clockOffset

	mu            sync.Mutex
	facts         *v1.Node
	ownWrites     map[types.UID]ownWrite
	readiness     map[types.UID]v1.ConditionStatus // last reported readiness, by pod
	pendingTokens int                              // number of token requests that are not answered yet
}

// ownWrite records that this session has changed a pod from the revision from to the revision to.
type ownWrite struct {
	from, to uint64
	stored   *v1.Pod // the pod at the revision to
}

// NewReporter returns the Reporter of a node for a session. cert is the node's client certificate.
// When ctx ends, writes are canceled.
func NewReporter(ctx context.Context, cfg *Config, session Session, node string, cert *x509.Certificate) *Reporter {
	r := &Reporter{
		cfg: cfg, session: session, node: node, cert: cert, log: cfg.Log.With("node", node),
		api: cfg.Client.As(api.NodeUser(node)), writes: newWriteQueue(ctx, maxConcurrentWrites),
		ownWrites: make(map[types.UID]ownWrite), readiness: make(map[types.UID]v1.ConditionStatus),
	}
	failures := &failureLog{log: r.log}
	r.writes.onFailure = func(key string, tries int, err error) { failures.recordFailure(key, tries, err, time.Now()) }
	return r
}

// CloseAndWait starts no more workers for writes and waits until the running workers have stopped.
// They stop soon after the context of NewReporter has ended, so the caller ends that context first.
func (r *Reporter) CloseAndWait() { r.writes.closeAndWait() }

// SetFacts stores the Node (labels, status and others) that the agent reported. SyncNode writes it.
func (r *Reporter) SetFacts(f *fleetv1.NodeFacts) error {
	n := &v1.Node{}
	if len(f.GetNode()) > 0 {
		if err := wire.DecodeObject(f.Node, "Node", n); err != nil {
			return fmt.Errorf("facts of node %s: %w", r.node, err)
		}
	}
	n.Name = r.node
	r.mu.Lock()
	r.facts = n
	r.mu.Unlock()
	return nil
}

// recordWrite records that this session has changed a pod from oldRevision to stored.
func (r *Reporter) recordWrite(oldRevision uint64, stored *v1.Pod) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if w, ok := r.ownWrites[stored.UID]; ok && w.to == oldRevision {
		oldRevision = w.from // two writes without an update in between are recorded as one
	}
	r.ownWrites[stored.UID] = ownWrite{oldRevision, wire.RevisionOf(stored), stored}
}

// newestPod returns the newest version of a pod: that in the informer cache, or that of this
// session's last write if the cache is out of date.
func (r *Reporter) newestPod(namespace, name string, uid types.UID) (*v1.Pod, bool) {
	pod, ok := r.cfg.Objects.Pod(namespace, name)
	r.mu.Lock()
	defer r.mu.Unlock()
	if w, wrote := r.ownWrites[uid]; wrote && ok && pod.UID == uid && w.to > wire.RevisionOf(pod) {
		return w.stored, true
	}
	return pod, ok
}

// IsOwnWrite reports whether this session made the change of a pod from oldRevision to newRevision.
// It deletes an outdated record.
func (r *Reporter) IsOwnWrite(uid types.UID, oldRevision, newRevision uint64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	w, ok := r.ownWrites[uid]
	if ok && newRevision >= w.to {
		delete(r.ownWrites, uid)
	}
	return ok && w.from == oldRevision && w.to == newRevision
}
