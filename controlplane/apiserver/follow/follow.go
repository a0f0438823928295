// Package follow keeps something in memory equal to the stored objects of a kind.
package follow

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
)

// Source is where objects are read from: the registry. List answers a request for Pointers.
type Source interface {
	List(ctx context.Context, r *api.Request) (runtime.Object, error)
	Watch(ctx context.Context, r *api.Request) (watch.Interface, error)
}

// Sink receives the objects of one kind: first all of them, then changes.
type Sink interface {
	Replace(all []api.Object)
	Set(o api.Object)
	Remove(o api.Object)
}

// Progress is what a Sink may be as well: it is told up to which resource version it is equal to what is stored, which
// bookmarks say too.
type Progress interface {
	Reached(resourceVersion string)
}

// Lighter is what a Sink may be as well: it takes objects in the light form (api.Version.Light).
type Lighter interface {
	TakesLight()
}

func light(to Sink) bool {
	_, ok := to.(Lighter)
	return ok
}

func reached(to Sink, resourceVersion string) {
	if p, ok := to.(Progress); ok {
		p.Reached(resourceVersion)
	}
}

// Run keeps a sink equal to the stored objects of a kind until ctx ends. synced is called after every full list.
func Run(ctx context.Context, log *slog.Logger, src Source, kind *api.Kind, to Sink, synced func()) error {
	again := backoff.Backoff{Min: 10 * time.Millisecond, Max: 2 * time.Second, Jitter: 0.3}
	for {
		err := once(ctx, src, kind, to, func() { again.Reset(); synced() })
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			log.Warn("lost a watch, listing again", "resource", kind.Resource, "err", err)
		}
		if err := wait.Delay(ctx, again.Next()); err != nil {
			return err
		}
	}
}

func once(ctx context.Context, src Source, kind *api.Kind, to Sink, synced func()) error {
	answer, err := src.List(ctx, &api.Request{Verb: api.VerbList, Kind: kind, Pointers: true, Light: light(to)})
	if err != nil {
		return fmt.Errorf("listing %s: %w", kind.Resource, err)
	}
	list, ok := answer.(*api.ObjectList)
	if !ok {
		return fmt.Errorf("listing %s: the answer is a %T", kind.Resource, answer)
	}
	to.Replace(list.Items)
	reached(to, list.ResourceVersion)
	synced()
	at := list.ResourceVersion
	for {
		at, err = from(ctx, src, kind, to, at)
		if err != nil || ctx.Err() != nil {
			return err
		}
	}
}

// from watches until the watch ends and returns the resource version to resume from.
func from(ctx context.Context, src Source, kind *api.Kind, to Sink, at string) (string, error) {
	w, err := src.Watch(ctx, &api.Request{Verb: api.VerbWatch, Kind: kind, Light: light(to), List: metav1.ListOptions{
		Watch: true, ResourceVersion: at, AllowWatchBookmarks: true,
	}})
	if err != nil {
		return at, fmt.Errorf("watching %s from %s: %w", kind.Resource, at, err)
	}
	defer w.Stop()
	for ev := range w.ResultChan() {
		switch ev.Type {
		case watch.Error:
			return at, fmt.Errorf("watching %s from %s: %w", kind.Resource, at, apierrors.FromObject(ev.Object))
		case watch.Bookmark:
		case watch.Deleted:
			to.Remove(ev.Object.(api.Object))
		default:
			to.Set(ev.Object.(api.Object))
		}
		if o, ok := ev.Object.(metav1.Object); ok {
			at = o.GetResourceVersion()
			reached(to, at)
		}
	}
	return at, nil
}
