package nodegateway

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
)

// event stores an Event that the node reports. An identical Event within ten minutes only
// increments the count of the stored one.
func (x *session) event(raw []byte) error {
	e := &v1.Event{}
	if err := decode(raw, "Event", e); err != nil {
		return fmt.Errorf("event: %w", err)
	}
	e.ManagedFields, e.OwnerReferences, e.Finalizers = nil, nil, nil // an Event does not need them, and they may be large
	if e.Namespace == "" {
		e.Namespace = metav1.NamespaceDefault
	}
	id := eventID{types.UID(short(string(e.InvolvedObject.UID))), short(e.InvolvedObject.Name),
		short(e.InvolvedObject.FieldPath),
		short(e.Type), short(e.Reason), short(e.Message)}
	if x.work.backlog() > maxBacklog {
		return fmt.Errorf("event %s of %s dropped: too many writes wait", e.Reason, e.InvolvedObject.Name)
	}
	entry, stamp := x.srv.events.entry(id, time.Now())
	x.put(fmt.Sprintf("event/%d", stamp), eventGrows*len(raw), func(ctx context.Context) error {
		return x.writeEvent(ctx, e, entry, stamp)
	})
	return nil
}

func (x *session) writeEvent(ctx context.Context, e *v1.Event, entry *eventEntry, stamp int64) error {
	entry.mu.Lock()
	defer entry.mu.Unlock()
	now := metav1.Now()
	if entry.name != "" {
		patch, err := json.Marshal(map[string]any{"count": entry.count + 1, "lastTimestamp": now})
		if err != nil {
			return fmt.Errorf("fleet: event: %w", err)
		}
		_, err = client.Patch[*v1.Event](ctx, x.api, e.Namespace, entry.name, "", types.MergePatchType, patch)
		switch {
		case err == nil:
			entry.count++
			return nil
		case apierrors.IsNotFound(err): // expired in the meantime: create it again
			entry.name, entry.count = "", 0
		default:
			return x.dropOrRetry(err, "count event of %s", e.InvolvedObject.Name)
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
		e.Source.Host = x.node
	}
	if e.Name == "" {
		e.Name = fmt.Sprintf("%s.%016x", e.InvolvedObject.Name, stamp)
	}
	stored, err := client.Create(ctx, x.api, e)
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	if err != nil {
		return x.dropOrRetry(err, "create event of %s", e.InvolvedObject.Name)
	}
	entry.name, entry.count = stored.Name, 1
	return nil
}

// dropOrRetry returns an error, for a retry, if the failure is temporary. Otherwise it logs the
// event and drops it.
func (x *session) dropOrRetry(err error, format string, args ...any) error {
	if apierrors.IsServerTimeout(err) || apierrors.IsTimeout(err) || apierrors.IsServiceUnavailable(err) ||
		apierrors.IsConflict(err) ||
		apierrors.IsTooManyRequests(err) {
		return x.failed(err, format, args...)
	}
	x.log.Debug("event dropped", "what", fmt.Sprintf(format, args...), "err", err)
	return nil
}

// eventID holds the fields by which two events are considered identical.
type eventID struct {
	uid                                types.UID
	name, field, kind, reason, message string
}

// short truncates a string from a node to the length that the event index keeps. No stored Event
// has longer ones.
func short(s string) string { return api.Clip(s, 1024) }

// eventEntry refers to the stored Event of one eventID.
type eventEntry struct {
	mu    sync.Mutex // held during writes of the Event
	name  string     // name of the stored Event; "" until it is created
	count int32

	id   eventID
	last time.Time
}

// eventIndex finds the stored Event of a repeated report. Its size is bounded; the least recently
// used entry is evicted first.
type eventIndex struct {
	mu    sync.Mutex
	byID  map[eventID]*list.Element
	order *list.List // of *eventEntry, most recently used first

	stamp int64 // stamp of the last report
}

const (
	maxBacklog      = 1024
	eventGrows      = 16 // approximate upper bound of a decoded Event's size relative to its encoding
	maxEventEntries = 4096
	eventWindow     = 10 * time.Minute
)

func newEventIndex() *eventIndex {
	return &eventIndex{byID: make(map[eventID]*list.Element), order: list.New()}
}

// entry returns the entry of id, or a new one if id was not reported within eventWindow. It also
// returns a unique stamp for the report: the time in nanoseconds, made larger than the last stamp.
// Names made of stamps are therefore in the order of the reports.
func (x *eventIndex) entry(id eventID, now time.Time) (*eventEntry, int64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.stamp = max(x.stamp+1, now.UnixNano())
	if el := x.byID[id]; el != nil {
		e := el.Value.(*eventEntry)
		if now.Sub(e.last) < eventWindow {
			e.last = now
			x.order.MoveToFront(el)
			return e, x.stamp
		}
		x.order.Remove(el)
	}
	e := &eventEntry{id: id, last: now}
	x.byID[id] = x.order.PushFront(e)
	if x.order.Len() > maxEventEntries {
		oldest := x.order.Back()
		x.order.Remove(oldest)
		delete(x.byID, oldest.Value.(*eventEntry).id)
	}
	return e, x.stamp
}
