package authz

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

// Source is where authorizers read from: the registry. List answers a request for Pointers.
type Source interface {
	List(ctx context.Context, r *api.Request) (runtime.Object, error)
	Watch(ctx context.Context, r *api.Request) (watch.Interface, error)
}

// sink receives the objects of one kind: first all of them, then changes.
type sink interface {
	replace(all []api.Object)
	set(o api.Object)
	remove(o api.Object)
}

// follow keeps a sink equal to the stored objects of a kind until ctx ends. synced is called after every full list.
func follow(ctx context.Context, log *slog.Logger, src Source, kind *api.Kind, to sink, synced func()) error {
	again := backoff.Backoff{Min: 10 * time.Millisecond, Max: 2 * time.Second, Jitter: 0.3}
	for {
		err := followOnce(ctx, src, kind, to, func() { again.Reset(); synced() })
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			log.Warn("authorization lost its watch, listing again", "resource", kind.Resource, "err", err)
		}
		if err := wait.Delay(ctx, again.Next()); err != nil {
			return err
		}
	}
}

func followOnce(ctx context.Context, src Source, kind *api.Kind, to sink, synced func()) error {
	answer, err := src.List(ctx, &api.Request{Verb: api.VerbList, Kind: kind, Pointers: true})
	if err != nil {
		return fmt.Errorf("listing %s: %w", kind.Resource, err)
	}
	list, ok := answer.(*api.ObjectList)
	if !ok {
		return fmt.Errorf("listing %s: the answer is a %T", kind.Resource, answer)
	}
	to.replace(list.Items)
	synced()
	at := list.ResourceVersion
	for {
		at, err = followFrom(ctx, src, kind, to, at)
		if err != nil || ctx.Err() != nil {
			return err
		}
	}
}

// followFrom watches until the watch ends and returns the resource version to resume from.
func followFrom(ctx context.Context, src Source, kind *api.Kind, to sink, at string) (string, error) {
	w, err := src.Watch(ctx, &api.Request{Verb: api.VerbWatch, Kind: kind, List: metav1.ListOptions{
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
			to.remove(ev.Object.(api.Object))
		default:
			to.set(ev.Object.(api.Object))
		}
		if o, ok := ev.Object.(metav1.Object); ok {
			at = o.GetResourceVersion()
		}
	}
	return at, nil
}
