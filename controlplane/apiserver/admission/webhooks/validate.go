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

// atOnce is the maximum number of concurrent calls of validating webhooks for one write.
const atOnce = 8

// Validate calls the matching validating webhooks, up to atOnce at a time. It returns the error of
// the first webhook in their order that denies the request, or fails with the failure policy Fail.
func (w *Webhooks) Validate(ctx context.Context, of *matching.Attempt) error {
	s := w.now.Load()
	if s == nil || len(s.validating) == 0 || of.Exempt() {
		return nil
	}
	a := &attempt{Attempt: of, of: w, set: s, kind: typeValidating}
	type asked struct {
		hook *hook
		view *seen
		err  error
	}
	var all []asked
	for _, h := range s.validating {
		v, err := a.concerns(ctx, h)
		if err != nil {
			return err
		}
		if v == nil {
			continue
		}
		if _, err := v.encode(); err != nil { // encode before the view is shared
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
	places := make(chan struct{}, atOnce)
	var wg sync.WaitGroup
	for i := range all {
		places <- struct{}{}
		wg.Go(func() {
			defer func() { <-places }()
			all[i].err = a.validate(ctx, all[i].hook, all[i].view)
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

// validate calls one webhook. A panic becomes an error of this request instead of ending the
// process.
func (a *attempt) validate(ctx context.Context, h *hook, v *seen) (err error) {
	defer func() {
		if r := recover(); r != nil {
			a.of.cfg.Log.Error("a validating webhook's answer made this replica panic", "webhook", h.name, "panic", r,
				"stack", string(debug.Stack()))
			err = apierrors.NewInternalError(fmt.Errorf("ValidatingAdmissionWebhook/%v has panicked", h.name))
		}
	}()
	start := time.Now()
	_, err = a.ask(ctx, h, v)
	return a.judge(ctx, h, err, time.Since(start))
}
