package report

import (
	"container/list"
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/nodegateway/wire"
)

// HandleEvent stores an Event that the node reports. If an identical Event was reported within ten
// minutes, it only increments the count of the stored Event.
func (r *Reporter) HandleEvent(raw []byte) error {
	e := &v1.Event{}
	if err := wire.DecodeObject(raw, "Event", e); err != nil {
		return fmt.Errorf("event: %w", err)
	}
	// an Event does not need them, and they may be large
	e.ManagedFields, e.OwnerReferences, e.Finalizers = nil, nil, nil
	if e.Namespace == "" {
		e.Namespace = metav1.NamespaceDefault
	}
	id := eventID{types.UID(clipString(string(e.InvolvedObject.UID))), clipString(e.InvolvedObject.Name),
		clipString(e.InvolvedObject.FieldPath),
		clipString(e.Type), clipString(e.Reason), clipString(e.Message)}
	if r.writes.queuedKeys() > maxBacklog {
		return fmt.Errorf("event %s of %s dropped: too many writes wait", e.Reason, e.InvolvedObject.Name)
	}
	entry, stamp := r.cfg.Events.findOrAddEntry(id, time.Now())
	r.QueueWrite(fmt.Sprintf("event/%d", stamp), decodedEventFactor*len(raw), func(ctx context.Context) error {
		return r.writeEvent(ctx, e, entry, stamp)
	})
	return nil
}

func (r *Reporter) writeEvent(ctx context.Context, e *v1.Event, entry *eventEntry, stamp int64) error {
	entry.mu.Lock()
	defer entry.mu.Unlock()
	now := metav1.Now()
	if entry.name != "" {
		patch, err := json.Marshal(map[string]any{"count": entry.count + 1, "lastTimestamp": now})
		if err != nil {
			return fmt.Errorf("fleet: event: %w", err)
		}
		_, err = client.Patch[*v1.Event](ctx, r.api, e.Namespace, entry.name, "", types.MergePatchType, patch)
		switch {
		case err == nil:
			entry.count++
			return nil
		case apierrors.IsNotFound(err): // the Event has expired: create it again
			entry.name, entry.count = "", 0
		default:
			return r.dropOrRetry(err, "count event of %s", e.InvolvedObject.Name)
		}
	}
	e = e.DeepCopy()
	e.Count = 1
	if e.FirstTimestamp.IsZero() {
		e.FirstTimestamp = now
	}
	if e.LastTimestamp.IsZero() {
		e.LastTimestamp = e.FirstTimestamp
	}
	if e.Source.Host == "" {
		e.Source.Host = r.node
	}
	if e.Name == "" {
		e.Name = fmt.Sprintf("%s.%016x", e.InvolvedObject.Name, stamp)
	}
	stored, err := client.Create(ctx, r.api, e)
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	if err != nil {
		return r.dropOrRetry(err, "create event of %s", e.InvolvedObject.Name)
	}
	entry.name, entry.count = stored.Name, 1
	return nil
}

// dropOrRetry returns err if the failure is temporary, so that the write is retried. Otherwise it
// logs the failure and returns nil, which drops the Event.
func (r *Reporter) dropOrRetry(err error, format string, args ...any) error {
	if apierrors.IsServerTimeout(err) || apierrors.IsTimeout(err) || apierrors.IsServiceUnavailable(err) ||
		apierrors.IsConflict(err) ||
		apierrors.IsTooManyRequests(err) {
		return r.wrapFailure(err, format, args...)
	}
	r.log.Debug("event dropped", "what", fmt.Sprintf(format, args...), "err", err)
	return nil
}

// eventID contains the fields by which two Events are considered identical.
type eventID struct {
	uid                                types.UID
	name, field, kind, reason, message string
}

// clipString truncates a string in a node's Event to the maximum length in the event index. The
// strings in stored Events are not longer.
func clipString(s string) string { return api.Truncate(s, 1024) }

// eventEntry refers to the stored Event of one eventID.
type eventEntry struct {
	mu    sync.Mutex // held while the Event is written
	name  string     // name of the stored Event; empty until it is created
	count int32

	id   eventID
	last time.Time
}

// EventIndex finds the stored Event of a repeated report. Its size is limited: the least recently
// used entry is evicted first.
type EventIndex struct {
	mu    sync.Mutex
	byID  map[eventID]*list.Element
	order *list.List // of *eventEntry, most recently used first

	stamp int64 // result of findOrAddEntry for the last report
}

const (
	maxBacklog         = 1024
	decodedEventFactor = 16 // approximate maximum of the size of a decoded Event, relative to its encoding
	maxEventEntries    = 4096
	eventWindow        = 10 * time.Minute
)

func NewEventIndex() *EventIndex {
	return &EventIndex{byID: make(map[eventID]*list.Element), order: list.New()}
}

// findOrAddEntry returns the entry of id, or a new entry if id was not reported within eventWindow.
// It also returns a unique number for the report: the time in nanoseconds, but more than the last
// number. The order of the names of Events, which contain these numbers, is therefore that of the
// reports.
func (i *EventIndex) findOrAddEntry(id eventID, now time.Time) (*eventEntry, int64) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.stamp = max(i.stamp+1, now.UnixNano())
	if el := i.byID[id]; el != nil {
		e := el.Value.(*eventEntry)
		if now.Sub(e.last) < eventWindow {
			e.last = now
			i.order.MoveToFront(el)
			return e, i.stamp
		}
		i.order.Remove(el)
	}
	e := &eventEntry{id: id, last: now}
	i.byID[id] = i.order.PushFront(e)
	if i.order.Len() > maxEventEntries {
		oldest := i.order.Back()
		i.order.Remove(oldest)
		delete(i.byID, oldest.Value.(*eventEntry).id)
	}
	return e, i.stamp
}
