package node

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/agent/image"
	"keelson.dev/keelson/internal/virtual"
)

// rooms answers with what a test says, and notes what it was asked.
type rooms struct {
	mu     sync.Mutex
	done   image.Removed
	err    error
	needed []string
	looks  int
}

func (r *rooms) MakeRoom(_ context.Context, needed []string) (image.Removed, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.needed, r.looks = needed, r.looks+1
	return r.done, r.err
}

func (r *rooms) answer(done image.Removed, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.done, r.err = done, err
}

func (r *rooms) asked() (looks int, needed []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.looks, r.needed
}

// Images that pods of the node name are in use, unless the pod has ended. F106
func TestImagesOfPods(t *testing.T) {
	pod := func(phase v1.PodPhase) *v1.Pod {
		return &v1.Pod{Status: v1.PodStatus{Phase: phase}, Spec: v1.PodSpec{
			InitContainers: []v1.Container{{Image: "init:" + string(phase)}}, Containers: []v1.Container{{Image: "app:" + string(phase)}},
			EphemeralContainers: []v1.EphemeralContainer{{EphemeralContainerCommon: v1.EphemeralContainerCommon{Image: "debug:" + string(phase)}}}}}
	}
	got := imagesOf([]*v1.Pod{pod(v1.PodPending), pod(v1.PodFailed), pod(v1.PodRunning), pod(v1.PodSucceeded)})
	want := []string{"init:Pending", "app:Pending", "debug:Pending", "init:Running", "app:Running", "debug:Running"}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// A node on which no room can be made says so in an event of its own, and not all the time; metrics count what was
// removed. Before the pods of the node are known nothing is removed. F106
func TestImageRoomIsToldOf(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		store, c := &rooms{}, fake.NewCluster()
		objects := unsynced{Objects: c, synced: make(chan struct{})}
		r := &imageRoom{images: store, objects: objects, reporter: c, node: "w1", log: slog.New(slog.DiscardHandler)}
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- r.run(ctx) }()
		time.Sleep(time.Minute)
		virtual.Wait()
		if looks, _ := store.asked(); looks != 0 {
			t.Fatalf("%d looks before the pods are known", looks)
		}
		c.Put(&v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "default", UID: "u"}, Spec: v1.PodSpec{Containers: []v1.Container{{Name: "app", Image: "hello:1"}}}})
		store.answer(image.Removed{Images: 2, Bytes: 300}, nil)
		close(objects.synced)
		virtual.Wait()
		if looks, needed := store.asked(); looks != 1 || !slices.Equal(needed, []string{"hello:1"}) || len(c.Events("w1")) != 0 {
			t.Errorf("%d looks, %v are needed, events %v", looks, needed, c.Events("w1"))
		}
		store.answer(image.Removed{Short: true, Bytes: 100, Lacking: 50}, nil)
		time.Sleep(roomToldEvery - time.Second)
		virtual.Wait()
		want := "FreeDiskSpaceFailed Failed to garbage collect required amount of images. Attempted to free 150 bytes, but only found 100 bytes eligible to free."
		if got := c.Events("w1"); len(got) != 1 || !strings.Contains(got[0], want) {
			t.Errorf("events %v", got)
		}
		time.Sleep(roomToldEvery)
		virtual.Wait()
		if got := c.Events("w1"); len(got) != 2 {
			t.Errorf("it is short still: events %v", got)
		}
		store.answer(image.Removed{}, errors.New("the disk is read-only"))
		time.Sleep(roomEvery)
		virtual.Wait()
		if got := c.Events("w1"); len(got) != 3 || !strings.Contains(got[2], "ImageGCFailed the disk is read-only") {
			t.Errorf("events %v", got)
		}
		stop()
		<-done
		var text strings.Builder
		if err := r.writeMetrics(&text); err != nil {
			t.Fatal(err)
		}
		for _, line := range []string{"\nkeelson_images_removed_total 2\n", "\nkeelson_image_removal_failures_total 1\n"} {
			if !strings.Contains(text.String(), line) {
				t.Errorf("no %q in %s", line, text.String())
			}
		}
	})
}

// unsynced knows its pods from when synced is closed.
type unsynced struct {
	agent.Objects
	synced chan struct{}
}

func (u unsynced) Synced() <-chan struct{} { return u.synced }

// Who waits for room on the disk has images looked for at once, and is told when a whole look has been done. F106
func TestImageRoomIsClearedSoon(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		store, c := &rooms{}, fake.NewCluster()
		r := &imageRoom{images: store, objects: c, reporter: c, node: "w1", log: slog.New(slog.DiscardHandler), soon: make(chan struct{}, 1)}
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- r.run(ctx) }()
		sleep(time.Second)
		since := time.Now()
		if r.clear(since) {
			t.Error("a look from before counts")
		}
		virtual.Wait()
		if looks, _ := store.asked(); looks != 2 || !r.clear(since) {
			t.Errorf("%d looks, want one from the beginning and one that was asked for", looks)
		}
		virtual.Wait()
		if looks, _ := store.asked(); looks != 2 {
			t.Errorf("%d looks: the answer was there", looks)
		}
		stop()
		<-done
	})
}
