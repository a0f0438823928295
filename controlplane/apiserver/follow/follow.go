// Package follow keeps an in-memory copy of the stored objects of a kind up to date with list and
// watch.
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

// Source lists and watches objects; the registry implements it. List returns an *api.ObjectList if
// the request sets Pointers.
type Source interface {
	List(ctx context.Context, r *api.Request) (runtime.Object, error)
	Watch(ctx context.Context, r *api.Request) (watch.Interface, error)
}

// Sink receives the objects of one kind: first the complete list with Replace, then changes with
// Set and Remove.
type Sink interface {
	Replace(all []api.Object)
	Set(o api.Object)
	Remove(o api.Object)
}

// Progress is an optional interface of a Sink. Reached is called with the resourceVersion up to
// which the Sink has received all changes, also after bookmarks.
type Progress interface {
	Reached(resourceVersion string)
}

// Lighter is an optional interface of a Sink that accepts objects in the light form
// (api.Version.Light).
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

// Run lists and watches a kind and passes all objects and changes to a Sink, until ctx ends. It
// calls synced after each list. After an error it lists again.
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

// from watches from resourceVersion at until the watch ends. It returns the resourceVersion from
// which to resume.
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
