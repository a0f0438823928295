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
// Internal.Pointers of the request is true.
type Source interface {
	List(ctx context.Context, r *api.Request) (runtime.Object, error)
	Watch(ctx context.Context, r *api.Request) (watch.Interface, error)
}

// Sink receives the objects of one kind: first the complete list by Replace, then changes by Set
// and Remove.
type Sink interface {
	Replace(all []api.Object)
	Set(o api.Object)
	Remove(o api.Object)
}

// ProgressReceiver is an optional interface of a Sink. SetReached is called with the
// resourceVersion up to which the Sink has received all changes, also for bookmarks.
type ProgressReceiver interface {
	SetReached(resourceVersion string)
}

// LightReceiver is an optional interface of a Sink that accepts objects in the light form
// (api.Light), in which parts of an object are encoded.
type LightReceiver interface {
	TakesLight()
}

func takesLight(sink Sink) bool {
	_, ok := sink.(LightReceiver)
	return ok
}

func reportProgress(sink Sink, resourceVersion string) {
	if p, ok := sink.(ProgressReceiver); ok {
		p.SetReached(resourceVersion)
	}
}

// Run lists and watches a kind and passes all objects and changes to a Sink, until ctx ends. It
// calls synced after each list. After an error it starts again with a list.
func Run(ctx context.Context, log *slog.Logger, src Source, kind *api.Kind, sink Sink, synced func()) error {
	again := backoff.Backoff{Min: 10 * time.Millisecond, Max: 2 * time.Second, Jitter: 0.3}
	for {
		err := listAndWatch(ctx, src, kind, sink, func() { again.Reset(); synced() })
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			log.Warn("watch ended, listing again", "resource", kind.Resource, "err", err)
		}
		if err := wait.Delay(ctx, again.Next()); err != nil {
			return err
		}
	}
}

func listAndWatch(ctx context.Context, src Source, kind *api.Kind, sink Sink, synced func()) error {
	answer, err := src.List(ctx, &api.Request{Verb: api.VerbList, Kind: kind,
		Internal: api.InternalOptions{Pointers: true, Light: takesLight(sink)}})
	if err != nil {
		return fmt.Errorf("listing %s: %w", kind.Resource, err)
	}
	list, ok := answer.(*api.ObjectList)
	if !ok {
		return fmt.Errorf("listing %s: unexpected result type %T", kind.Resource, answer)
	}
	sink.Replace(list.Items)
	reportProgress(sink, list.ResourceVersion)
	synced()
	at := list.ResourceVersion
	for {
		at, err = watchFrom(ctx, src, kind, sink, at)
		if err != nil || ctx.Err() != nil {
			return err
		}
	}
}

// watchFrom watches from resourceVersion until the watch ends. It returns the resourceVersion at
// which the next watch must start.
func watchFrom(ctx context.Context, src Source, kind *api.Kind, sink Sink, resourceVersion string) (string, error) {
	w, err := src.Watch(ctx,
		&api.Request{Verb: api.VerbWatch, Kind: kind, Internal: api.InternalOptions{Light: takesLight(sink)},
			List: metav1.ListOptions{
				Watch: true, ResourceVersion: resourceVersion, AllowWatchBookmarks: true,
			}})
	if err != nil {
		return resourceVersion, fmt.Errorf("watching %s from %s: %w", kind.Resource, resourceVersion, err)
	}
	defer w.Stop()
	for ev := range w.ResultChan() {
		switch ev.Type {
		case watch.Error:
			return resourceVersion, fmt.Errorf("watching %s from %s: %w", kind.Resource, resourceVersion,
				apierrors.FromObject(ev.Object))
		case watch.Bookmark:
		case watch.Deleted:
			sink.Remove(ev.Object.(api.Object))
		default:
			sink.Set(ev.Object.(api.Object))
		}
		if o, ok := ev.Object.(metav1.Object); ok {
			resourceVersion = o.GetResourceVersion()
			reportProgress(sink, resourceVersion)
		}
	}
	return resourceVersion, nil
}
