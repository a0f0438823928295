package admission

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// Phase is a group of plugins: what is built in, policies, webhooks.
type Phase struct {
	Name    string
	Plugins []Plugin
	// SideBySide lets the plugins of a validating phase run at the same time. They must then be safe for that.
	SideBySide bool
}

// Mutators are the phases that may change what is asked, one plugin after the other. When a plugin has called
// Attempt.Reinvoke, all are called a second time, with Attempt.Again: what is built in sees what later ones changed; of
// policies and webhooks those act again that want to be reinvoked, as they know themselves. There is no third time.
type Mutators []Phase

// Admit runs the phases.
func (m Mutators) Admit(ctx context.Context, a *Attempt) error {
	for {
		for i := range m {
			for j := range m[i].Plugins {
				if err := m[i].Plugins[j].Admit(ctx, a); err != nil {
					return err
				}
			}
		}
		if !a.NextRound() {
			return nil
		}
	}
}

// Validators are the phases that may refuse, one phase after the other.
type Validators []Phase

// Admit runs the phases. Of the plugins of one phase that runs side by side the first in the list that refuses is heard.
func (v Validators) Admit(ctx context.Context, a *Attempt) error {
	for i := range v {
		run := v[i].inOrder
		if v[i].SideBySide && len(v[i].Plugins) > 1 {
			run = v[i].sideBySide
		}
		if err := run(ctx, a); err != nil {
			return err
		}
	}
	return nil
}

func (p *Phase) inOrder(ctx context.Context, a *Attempt) error {
	for i := range p.Plugins {
		if err := p.Plugins[i].Admit(ctx, a); err != nil {
			return err
		}
	}
	return nil
}

// sideBySide waits for all: a plugin that is still at work must not find the attempt committed.
func (p *Phase) sideBySide(ctx context.Context, a *Attempt) error {
	said := make([]error, len(p.Plugins))
	var all errgroup.Group
	for i := range p.Plugins {
		all.Go(func() error {
			defer func() {
				if x := recover(); x != nil {
					said[i] = apierrors.NewInternalError(fmt.Errorf("admission plugin %s: panic: %v", p.Plugins[i].Name, x))
				}
			}()
			said[i] = p.Plugins[i].Admit(ctx, a)
			return nil
		})
	}
	_ = all.Wait() // what they said is in said
	for _, err := range said {
		if err != nil {
			return err
		}
	}
	return nil
}
