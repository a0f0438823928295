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
)

const (
	// roomEvery is the time between two looks at the room that images have.
	roomEvery = 10 * time.Second
	// roomToldEvery is how often the same trouble is told of, as often as kubelet looks.
	roomToldEvery = 5 * time.Minute
)

// imageRoom has images removed that nothing uses while the disk is short, and tells where that is not enough.
type imageRoom struct {
	images interface { // *image.Store
		MakeRoom(ctx context.Context, needed []string) (image.Removed, error)
	}
	objects  agent.Objects
	reporter agent.Reporter
	node     string
	log      *slog.Logger

	told map[string]time.Time // by reason
	soon chan struct{}        // capacity 1: somebody waits for a look; nil: nobody can
	held func() bool          // something else goes first, for some time at most; nil: nothing does

	mu                      sync.Mutex
	removed, bytes, failing int64
	began                   time.Time // of the last look that has ended
}

// clear has images looked for soon, and says whether a whole look has begun since.
func (r *imageRoom) clear(since time.Time) bool {
	r.mu.Lock()
	done := !r.began.Before(since)
	r.mu.Unlock()
	if !done {
		select {
		case r.soon <- struct{}{}:
		default:
		}
	}
	return done
}

// run works until ctx ends. Which pods the node has must be known first: after a reboot no container tells which images
// are in use.
func (r *imageRoom) run(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-r.objects.Synced():
	}
	tick := time.NewTicker(roomEvery)
	defer tick.Stop()
	for {
		r.look(ctx, time.Now())
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		case <-r.soon:
		}
	}
}

// look does it once.
func (r *imageRoom) look(ctx context.Context, now time.Time) {
	if r.held != nil && r.held() {
		return
	}
	done, err := r.images.MakeRoom(ctx, imagesOf(r.objects.Pods()))
	if ctx.Err() != nil {
		return
	}
	r.mu.Lock()
	r.began = now
	r.removed += int64(done.Images)
	r.bytes += done.Bytes
	if err != nil {
		r.failing++
	}
	r.mu.Unlock()
	if done.Images > 0 {
		r.log.Info("images were removed: the disk was short", "images", done.Images, "bytes", done.Bytes)
	}
	switch {
	case err != nil:
		r.tell("ImageGCFailed", err.Error(), now)
	case done.Short:
		r.tell("FreeDiskSpaceFailed", fmt.Sprintf("Failed to garbage collect required amount of images. Attempted to free %d bytes, but only found %d bytes eligible to free.",
			done.Bytes+done.Lacking, done.Bytes), now)
	default:
		clear(r.told)
	}
}

// imagesOf are the names of the images of pods that have not ended. Pure.
func imagesOf(pods []*v1.Pod) []string {
	var out []string
	for _, p := range pods {
		if p.Status.Phase == v1.PodSucceeded || p.Status.Phase == v1.PodFailed {
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

// tell makes an event of the node, as kubelet words it.
func (r *imageRoom) tell(reason, message string, now time.Time) {
	if last, ok := r.told[reason]; ok && now.Sub(last) < roomToldEvery {
		return
	}
	if r.told == nil {
		r.told = map[string]time.Time{}
	}
	r.told[reason] = now
	r.log.Warn("no room can be made on the disk of the images", "reason", reason, "err", message)
	r.reporter.Event(nodeEvent(r.node, v1.EventTypeWarning, reason, message, now))
}

// nodeEvent is an event of the node itself. Its UID is the node's name, as kubelet has it: there people look for it.
func nodeEvent(node, kind, reason, message string, now time.Time) *v1.Event {
	const limit = 1024 // as the API's validation
	if len(message) > limit {
		message = message[:limit-3] + "..."
	}
	at := metav1.NewTime(now)
	return &v1.Event{
		ObjectMeta:     metav1.ObjectMeta{Name: fmt.Sprintf("%s.%016x", node, now.UnixNano()), Namespace: metav1.NamespaceDefault},
		InvolvedObject: v1.ObjectReference{Kind: "Node", Name: node, UID: types.UID(node)},
		Reason:         reason, Message: message, Type: kind, FirstTimestamp: at, LastTimestamp: at, Count: 1,
		Source: v1.EventSource{Component: "kubelet", Host: node}, ReportingController: "kubelet", ReportingInstance: node,
	}
}

// writeMetrics writes what was removed, in Prometheus' text form.
func (r *imageRoom) writeMetrics(to io.Writer) error {
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
