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
	"keelson.dev/keelson/internal/wakeup"
)

// fakeStore returns the results that a test sets, and records requests.
type fakeStore struct {
	mu     sync.Mutex
	done   image.Removed
	err    error
	needed []string
	looks  int
}

func (r *fakeStore) MakeRoom(_ context.Context, needed []string) (image.Removed, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.needed, r.looks = needed, r.looks+1
	return r.done, r.err
}

func (r *fakeStore) setResult(done image.Removed, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.done, r.err = done, err
}

func (r *fakeStore) lastRequest() (looks int, needed []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.looks, r.needed
}

// Images of pods of the node are in use, unless the pod has ended. F106
func TestImagesOfPods(t *testing.T) {
	pod := func(phase v1.PodPhase) *v1.Pod {
		return &v1.Pod{Status: v1.PodStatus{Phase: phase}, Spec: v1.PodSpec{
			InitContainers: []v1.Container{{Image: "init:" + string(phase)}},
			Containers:     []v1.Container{{Image: "app:" + string(phase)}},
			EphemeralContainers: []v1.EphemeralContainer{
				{EphemeralContainerCommon: v1.EphemeralContainerCommon{Image: "debug:" + string(phase)}}}}}
	}
	got := imagesOfPods([]*v1.Pod{pod(v1.PodPending), pod(v1.PodFailed), pod(v1.PodRunning), pod(v1.PodSucceeded)})
	want := []string{"init:Pending", "app:Pending", "debug:Pending", "init:Running", "app:Running", "debug:Running"}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// A node that cannot free enough disk space records an event, but not at every check. Metrics count
// removed images. Nothing is removed before the pods of the node are known. F106
func TestImageRoomIsToldOf(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		store, c := &fakeStore{}, fake.NewCluster()
		objects := unsynced{Objects: c, synced: make(chan struct{})}
		r := &imageGC{images: store, objects: objects, reporter: c, node: "w1", log: slog.New(slog.DiscardHandler)}
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- r.runCollections(ctx) }()
		time.Sleep(time.Minute)
		virtual.Wait()
		if looks, _ := store.lastRequest(); looks != 0 {
			t.Fatalf("%d looks before the pods are known", looks)
		}
		c.Put(&v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "default", UID: "u"},
			Spec: v1.PodSpec{Containers: []v1.Container{{Name: "app", Image: "hello:1"}}}})
		store.setResult(image.Removed{Images: 2, Bytes: 300}, nil)
		close(objects.synced)
		virtual.Wait()
		if looks, needed := store.lastRequest(); looks != 1 || !slices.Equal(needed, []string{"hello:1"}) ||
			len(c.Events("w1")) != 0 {
			t.Errorf("%d looks, %v are needed, events %v", looks, needed, c.Events("w1"))
		}
		store.setResult(image.Removed{Short: true, Bytes: 100, Lacking: 50}, nil)
		time.Sleep(eventInterval - time.Second)
		virtual.Wait()
		want := "FreeDiskSpaceFailed Failed to garbage collect required amount of images. Attempted to free 150 " +
			"bytes, but only found 100 bytes eligible to free."
		if got := c.Events("w1"); len(got) != 1 || !strings.Contains(got[0], want) {
			t.Errorf("events %v", got)
		}
		time.Sleep(eventInterval)
		virtual.Wait()
		if got := c.Events("w1"); len(got) != 2 {
			t.Errorf("it is short still: events %v", got)
		}
		store.setResult(image.Removed{}, errors.New("the disk is read-only"))
		time.Sleep(imageGCInterval)
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
		for _, line := range []string{"\nkeelson_images_removed_total 2\n",
			"\nkeelson_image_removal_failures_total 1\n"} {
			if !strings.Contains(text.String(), line) {
				t.Errorf("no %q in %s", line, text.String())
			}
		}
	})
}

// unsynced has no pods before synced is closed.
type unsynced struct {
	agent.Objects
	synced chan struct{}
}

func (u unsynced) Synced() <-chan struct{} { return u.synced }

// A request for disk space starts an image garbage collection at once, and returns when one has
// completed. F106
func TestImageRoomIsClearedSoon(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		store, c := &fakeStore{}, fake.NewCluster()
		r := &imageGC{images: store, objects: c, reporter: c, node: "w1", log: slog.New(slog.DiscardHandler),
			requested: wakeup.New()}
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- r.runCollections(ctx) }()
		sleepAround(time.Second)
		since := time.Now()
		if r.requestCollection(since) {
			t.Error("a look from before counts")
		}
		virtual.Wait()
		if looks, _ := store.lastRequest(); looks != 2 || !r.requestCollection(since) {
			t.Errorf("%d looks, want one from the beginning and one that was asked for", looks)
		}
		virtual.Wait()
		if looks, _ := store.lastRequest(); looks != 2 {
			t.Errorf("%d looks: the answer was there", looks)
		}
		stop()
		<-done
	})
}
