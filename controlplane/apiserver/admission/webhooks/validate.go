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

// atOnce is how many validating webhooks are asked about one write at the same time.
const atOnce = 8

// Validate asks the validating webhooks that are concerned, several at a time. The first in their order that denies,
// or fails and must not, decides.
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
		if _, err := v.encode(); err != nil { // before it is shared
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

// validate asks one webhook. A panic is an error of this request, not the end of the process.
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
