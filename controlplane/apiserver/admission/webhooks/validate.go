package webhooks

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"keelson.dev/keelson/controlplane/apiserver/admission/matching"
)

// maxConcurrentCalls limits the calls of validating webhooks that one write makes at the same time.
const maxConcurrentCalls = 8

// Validate calls the matching validating webhooks concurrently, up to maxConcurrentCalls at a time.
// It returns the error of the first webhook, in their order, that denies the request or that fails
// and has the failure policy Fail.
func (w *Webhooks) Validate(ctx context.Context, request *matching.Attempt) error {
	s := w.current.Load()
	if s == nil || len(s.validating) == 0 || request.Exempt() {
		return nil
	}
	a := &invocation{attempt: request, engine: w, set: s, kind: typeValidating}
	type asked struct {
		hook *hook
		view *objectView
		err  error
	}
	var all []asked
	for _, h := range s.validating {
		v, err := a.viewFor(ctx, h)
		if err != nil {
			return err
		}
		if v == nil {
			continue
		}
		if _, err := v.encodeView(); err != nil { // encode before the view is shared
			return apierrors.NewInternalError(err)
		}
		all = append(all, asked{hook: h, view: v})
	}
	if len(all) == 0 {
		return nil
	}
	if ctx.Err() != nil {
		return errTimeout()
	}
	places := make(chan struct{}, maxConcurrentCalls)
	var wg sync.WaitGroup
	for i := range all {
		places <- struct{}{}
		wg.Go(func() {
			defer func() { <-places }()
			all[i].err = a.validateObject(ctx, all[i].hook, all[i].view)
		})
	}
	wg.Wait()
	for _, one := range all {
		if one.err != nil {
			return one.err
		}
	}
	return nil
}

// validateObject calls one webhook. A panic becomes an error of this request instead of ending the
// process.
func (a *invocation) validateObject(ctx context.Context, h *hook, v *objectView) (err error) {
	defer func() {
		if r := recover(); r != nil {
			a.engine.cfg.Log.Error("panic while handling a validating webhook", "webhook", h.name, "panic", r,
				"stack", string(debug.Stack()))
			err = apierrors.NewInternalError(fmt.Errorf("ValidatingAdmissionWebhook/%v has panicked", h.name))
		}
	}()
	start := time.Now()
	_, err = a.callWebhook(ctx, h, v)
	return a.handleResult(ctx, h, err, time.Since(start))
}
