package assign

import (
	"errors"
	"fmt"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Subscriber is the session of a feed.
type Subscriber interface {
	// WakeSender is called when Feed.ComputeUpdate must be called again. It must not block.
	WakeSender()
	// HandleNodeChange is called when the node's own Node has changed. becameReady is true if its
	// Ready condition has become true. It must not block.
	HandleNodeChange(becameReady bool)
	// IsOwnWrite reports whether the session itself caused the change of a pod from one revision to
	// another.
	IsOwnWrite(uid types.UID, oldRevision, newRevision uint64) bool
}

// Feed computes what a session sends to its agent: first the full assignment, then every change.
//
// Any goroutine may mark changed objects. ComputeUpdate and Release must be called by one
// goroutine.
type Feed struct {
	view       *View
	node       string
	subscriber Subscriber
	assignment *assignment
	full       bool   // the next update is the full assignment
	synced     uint64 // revision in the last update

	mu    sync.Mutex
	dirty map[key]struct{} // objects that may have changed
}

// Update is the content of the next messages to an agent.
type Update struct {
	Sets []*fleetv1.ObjectSet // in the order of sending
	Full bool                 // the sets are the full assignment
	// Revision is the revision that the agent has reached when it has received the sets. It is 0 if
	// it need not be sent.
	Revision uint64
	// Pods contains the pods of the node that may have changed.
	Pods []types.NamespacedName
	// Stopping contains the terminating pods that are sent with their deletion timestamp for the
	// first time.
	Stopping []types.UID
}

// Subscribe registers a feed for the session of a node. The feed's updates contain all changes
// after Subscribe has returned. resumed describes the objects that the agent already holds.
func (v *View) Subscribe(node string, subscriber Subscriber, resumed Resumption) *Feed {
	f := &Feed{view: v, node: node, subscriber: subscriber, full: true, dirty: make(map[key]struct{})}
	f.assignment = newAssignment(node, feedSource{v, f}, resumed)
	f.assignment.isOwnWrite = subscriber.IsOwnWrite
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.feeds[node] == nil {
		v.feeds[node] = make(map[*Feed]struct{})
	}
	v.feeds[node][f] = struct{}{}
	v.feedCount++
	return f
}

// Unsubscribe removes the feed from the view. The session's goroutine may still call ComputeUpdate;
// it calls Release when it ends.
func (f *Feed) Unsubscribe() {
	v := f.view
	v.mu.Lock()
	defer v.mu.Unlock()
	if _, ok := v.feeds[f.node][f]; !ok {
		return
	}
	v.feedCount--
	if delete(v.feeds[f.node], f); len(v.feeds[f.node]) == 0 {
		delete(v.feeds, f.node)
	}
}

// Release stops watching the objects that the assignment references.
func (f *Feed) Release() { f.assignment.unwatchAll() }

// ComputeUpdate returns the changes since the last update. After an error, the agent must connect
// again.
func (f *Feed) ComputeUpdate() (Update, error) {
	revision := f.view.sliceRevision.Load() // read before the dirty keys: it must not include later marks
	keys := f.takeDirty()
	if f.full {
		keys = f.assignment.updateReferences(nil, objectsOnAllNodes, f.view.nodeKeys(f.node))
	}
	u := Update{Full: f.full}
	for _, k := range keys {
		if k.kind == kindPod {
			u.Pods = append(u.Pods, types.NamespacedName{Namespace: k.namespace, Name: k.name})
		}
	}
	c, err := f.assignment.computeChange(keys)
	if errors.Is(err, errBehind) {
		return Update{}, errBehind
	}
	if err != nil {
		return Update{}, fmt.Errorf("fleet: assignment of node %s: %w", f.node, err)
	}
	u.Sets, u.Stopping = c.splitIntoSets(f.full), c.stopping
	if f.full || len(u.Sets) > 0 || revision > f.synced {
		f.synced, u.Revision = revision, revision
	}
	f.full = false
	return u, nil
}

// markDirty records that the object with a key may have changed. It never blocks.
func (f *Feed) markDirty(k key) {
	f.mu.Lock()
	f.dirty[k] = struct{}{}
	f.mu.Unlock()
	f.subscriber.WakeSender()
}

func (f *Feed) takeDirty() []key {
	f.mu.Lock()
	defer f.mu.Unlock()
	keys := make([]key, 0, len(f.dirty))
	for k := range f.dirty {
		keys = append(keys, k)
	}
	clear(f.dirty)
	return keys
}

// feedSource implements objectSource for one feed.
type feedSource struct {
	view *View
	feed *Feed
}

func (s feedSource) lookUpObject(k key) (api.Object, bool) { return s.view.lookUpObject(k) }

func (s feedSource) encodeObject(k kind, o api.Object) (*fleetv1.Object, error) {
	return s.view.encodings.encodeOnce(k, o)
}

func (s feedSource) readObjects(r readRequest) (position uint64, held bool, err error) {
	return s.view.objects.readSince(r)
}

func (s feedSource) readPeers(r readRequest) (position uint64, held bool, err error) {
	return s.view.peers.readSince(r)
}

func (s feedSource) batchCount() uint64 { return s.view.peerBatches.Load() }

func (s feedSource) listReferences(o api.Object) []key {
	return append(objectReferences(o), s.view.groups.policyReferences(o)...)
}

func (s feedSource) watchObject(k key) {
	v := s.view
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.watchers[k] == nil {
		v.watchers[k] = make(map[*Feed]struct{})
	}
	v.watchers[k][s.feed] = struct{}{}
}

func (s feedSource) unwatchObject(k key) {
	v := s.view
	v.mu.Lock()
	defer v.mu.Unlock()
	if delete(v.watchers[k], s.feed); len(v.watchers[k]) == 0 {
		delete(v.watchers, k)
	}
}
