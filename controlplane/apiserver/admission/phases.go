package admission

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// Phase is a group of plugins that run together: built-in plugins, policies or webhooks.
type Phase struct {
	Name    string
	Plugins []Plugin
	// SideBySide runs the plugins of a validating phase concurrently. The plugins must be safe for
	// concurrent use.
	SideBySide bool
}

// Mutators are the phases that may change the object; their plugins run one after the other. If a
// plugin calls Attempt.RequestSecondRound, all plugins run a second time, with
// Attempt.IsSecondRound true. Built-in plugins then handle the changes of later plugins. Policies
// and webhooks run again only if their reinvocation policy requires it. There is no third round.
type Mutators []Phase

// Admit runs the phases and returns the error of the first plugin that rejects the attempt.
func (m Mutators) Admit(ctx context.Context, a *Attempt) error {
	for {
		for i := range m {
			for j := range m[i].Plugins {
				if err := m[i].Plugins[j].Admit(ctx, a); err != nil {
					return err
				}
			}
		}
		if !a.StartSecondRound() {
			return nil
		}
	}
}

// Validators are the phases that may reject the attempt; they run one after the other.
type Validators []Phase

// Admit runs the phases. If several plugins of a concurrent phase reject the attempt, it returns
// the error of the first in the list.
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

// sideBySide runs the plugins concurrently and waits for all, so that no plugin is running when the
// attempt is committed.
func (p *Phase) sideBySide(ctx context.Context, a *Attempt) error {
	said := make([]error, len(p.Plugins))
	var all errgroup.Group
	for i := range p.Plugins {
		all.Go(func() error {
			defer func() {
				if x := recover(); x != nil {
					said[i] = apierrors.NewInternalError(fmt.Errorf("admission plugin %s: panic: %v",
						p.Plugins[i].Name, x))
				}
			}()
			said[i] = p.Plugins[i].Admit(ctx, a)
			return nil
		})
	}
	_ = all.Wait() // the errors are in said
	for _, err := range said {
		if err != nil {
			return err
		}
	}
	return nil
}
