package node

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/image"
	"keelson.dev/keelson/internal/wakeup"
)

const (
	// imageGCInterval is the time between two checks of the image file system.
	imageGCInterval = 10 * time.Second
	// eventInterval is the minimum time between two events about the same problem, like the
	// kubelet's.
	eventInterval = 5 * time.Minute
)

// imageGC removes unused images while little disk space is free. It reports an event if the removal
// does not free enough space.
type imageGC struct {
	images interface { // *image.Store
		MakeRoom(ctx context.Context, needed []string) (image.Removed, error)
	}
	objects  agent.Objects
	reporter agent.Reporter
	node     string
	log      *slog.Logger

	reported  map[string]time.Time // time of the last event, by reason
	requested wakeup.Signal        // signaled to request a collection; nil: no requests
	// reports whether other data is being removed first, so that images are not removed yet; nil =
	// never
	isHeld func() bool

	mu                      sync.Mutex
	removed, bytes, failing int64
	lastRun                 time.Time // start of the last completed collection
}

// requestCollection reports whether a collection that started at notBefore or later has completed.
// If not, it makes runCollections start a collection now.
func (r *imageGC) requestCollection(notBefore time.Time) bool {
	r.mu.Lock()
	done := !r.lastRun.Before(notBefore)
	r.mu.Unlock()
	if !done {
		r.requested.Send()
	}
	return done
}

// runCollections runs a collection of unused images at regular intervals and on request, until ctx
// ends. It first waits until the pods of the node are known: after a reboot, no container shows
// which images are in use.
func (r *imageGC) runCollections(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-r.objects.Synced():
	}
	tick := time.NewTicker(imageGCInterval)
	defer tick.Stop()
	for {
		r.collectOnce(ctx, time.Now())
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		case <-r.requested:
		}
	}
}

// collectOnce removes unused images if little disk space is free, and reports failures as events of
// the node.
func (r *imageGC) collectOnce(ctx context.Context, now time.Time) {
	if r.isHeld != nil && r.isHeld() {
		return
	}
	done, err := r.images.MakeRoom(ctx, imagesOfPods(r.objects.Pods()))
	if ctx.Err() != nil {
		return
	}
	r.mu.Lock()
	r.lastRun = now
	r.removed += int64(done.Images)
	r.bytes += done.Bytes
	if err != nil {
		r.failing++
	}
	r.mu.Unlock()
	if done.Images > 0 {
		r.log.Info("removed unused images because the disk was low on space", "images", done.Images,
			"bytes", done.Bytes)
	}
	switch {
	case err != nil:
		r.reportEvent("ImageGCFailed", err.Error(), now)
	case done.Short:
		r.reportEvent("FreeDiskSpaceFailed",
			fmt.Sprintf("Failed to garbage collect required amount of images. Attempted to free %d bytes, but only "+
				"found %d bytes eligible to free.",
				done.Bytes+done.Lacking, done.Bytes), now)
	default:
		clear(r.reported)
	}
}

// imagesOfPods returns the image names of the containers of all pods that have not ended. It is
// pure.
func imagesOfPods(pods []*v1.Pod) []string {
	var out []string
	for _, p := range pods {
		if agent.IsTerminalPhase(p.Status.Phase) {
			continue
		}
		for _, list := range [][]v1.Container{p.Spec.InitContainers, p.Spec.Containers} {
			for i := range list {
				out = append(out, list[i].Image)
			}
		}
		for i := range p.Spec.EphemeralContainers {
			out = append(out, p.Spec.EphemeralContainers[i].Image)
		}
	}
	return out
}

// reportEvent reports an event about this node with the kubelet's wording, at most once per
// eventInterval for each reason.
func (r *imageGC) reportEvent(reason, message string, now time.Time) {
	if last, ok := r.reported[reason]; ok && now.Sub(last) < eventInterval {
		return
	}
	if r.reported == nil {
		r.reported = map[string]time.Time{}
	}
	r.reported[reason] = now
	r.log.Warn("image garbage collection could not free enough disk space", "reason", reason, "err", message)
	r.reporter.Event(nodeEvent(r.node, v1.EventTypeWarning, reason, message, now))
}

// nodeEvent returns an event about the node. As in the kubelet, the UID of the involved object is
// the node's name, because clients search for it.
func nodeEvent(node, kind, reason, message string, now time.Time) *v1.Event {
	const limit = 1024 // limit of API validation
	if len(message) > limit {
		message = message[:limit-3] + "..."
	}
	at := metav1.NewTime(now)
	return &v1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s.%016x", node, now.UnixNano()),
			Namespace: metav1.NamespaceDefault},
		InvolvedObject: v1.ObjectReference{Kind: "Node", Name: node, UID: types.UID(node)},
		Reason:         reason, Message: message, Type: kind, FirstTimestamp: at, LastTimestamp: at, Count: 1,
		Source: v1.EventSource{Component: "kubelet", Host: node}, ReportingController: "kubelet",
		ReportingInstance: node,
	}
}

// writeMetrics writes the counters of removed images in the Prometheus text format.
func (r *imageGC) writeMetrics(to io.Writer) error {
	r.mu.Lock()
	removed, bytes, failing := r.removed, r.bytes, r.failing
	r.mu.Unlock()
	var first error
	for _, m := range []struct {
		name, help string
		value      int64
	}{{"keelson_images_removed_total", "Images removed because the disk was short and nothing used them", removed},
		{"keelson_images_removed_bytes_total", "Bytes of layers that went with removed images", bytes},
		{"keelson_image_removal_failures_total", "Times that images could not be removed from a short disk", failing}} {
		_, err := fmt.Fprintf(to, "# HELP %s %s\n# TYPE %s counter\n%s %d\n", m.name, m.help, m.name, m.name, m.value)
		first = cmp.Or(first, err)
	}
	return first
}
