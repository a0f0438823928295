package framework

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"
)

// PostFilter runs the PostFilter plugins until one of them returns success, and adds their messages
// to why. It returns the node that this plugin has nominated for the pod, or "".
func (p *Profile) PostFilter(ctx context.Context, c *Cycle, why *FitError) (nominated string) {
	started, code := c.startPoint(), Unschedulable
	defer func() { c.observePoint(TimedPostFilter, started, code) }()
	for _, f := range p.PostFilters {
		node, s := f.PostFilter(ctx, c, why)
		if m := s.Message(); m != "" {
			why.Post = strings.TrimSpace(why.Post + " " + m)
		}
		if code = codeOfStatus(s); s.OK() {
			return node
		}
	}
	return ""
}

// Reserve runs the Reserve plugins for the node that was chosen. If one of them does not return
// success, Reserve calls Unreserve of all these plugins and returns the failed plugin's status.
func (p *Profile) Reserve(ctx context.Context, c *Cycle, node string) *Status {
	started := c.startPoint()
	s := p.runReserves(ctx, c, node)
	c.observePoint(TimedReserve, started, codeOfStatus(s))
	if !s.OK() {
		p.Unreserve(ctx, c, node)
	}
	return s
}

// runReserves runs the Reserve plugins until one of them does not return success, and returns that
// plugin's status.
func (p *Profile) runReserves(ctx context.Context, c *Cycle, node string) *Status {
	for _, r := range p.Binding.Reserves {
		if s := r.Reserve(ctx, c, node); !s.OK() {
			return withPlugin(s, r.Name())
		}
	}
	return nil
}

// Unreserve calls Unreserve of all Reserve plugins, in reverse order.
func (p *Profile) Unreserve(ctx context.Context, c *Cycle, node string) {
	started := c.startPoint()
	for _, r := range slices.Backward(p.Binding.Reserves) {
		r.Unreserve(ctx, c, node)
	}
	c.observePoint(TimedUnreserve, started, Success)
}

// Permit runs the Permit plugins for the node that was chosen. s is the first status that is
// neither success nor Wait, or nil. waiting contains, by plugin name, the maximum delays of the
// plugins that returned Wait.
func (p *Profile) Permit(ctx context.Context, c *Cycle, node string) (s *Status, waiting map[string]time.Duration) {
	started := c.startPoint()
	defer func() {
		code := codeOfStatus(s)
		if s.OK() && len(waiting) > 0 {
			code = Wait
		}
		c.observePoint(TimedPermit, started, code)
	}()
	for _, r := range p.Binding.Permits {
		st, d := r.Permit(ctx, c, node)
		switch {
		case st.Is(Wait):
			if waiting == nil {
				waiting = make(map[string]time.Duration)
			}
			waiting[r.Name()] = d
		case !st.OK():
			return withPlugin(st, r.Name()), nil
		}
	}
	return nil, waiting
}

// Bind runs the PreBind plugins, binds the pod to the node, and runs the PostBind plugins. The pod
// is bound by an extender that implements Bind. Without such an extender, it is bound by the first
// Bind plugin that does not return Skip.
func (p *Profile) Bind(ctx context.Context, c *Cycle, node string) *Status {
	started := c.startPoint()
	s := p.runPreBinds(ctx, c, node)
	c.observePoint(TimedPreBind, started, codeOfStatus(s))
	if !s.OK() {
		return s
	}
	started = c.startPoint()
	s, done := p.bindWithExtender(ctx, c, node)
	if !done {
		s = p.runBinds(ctx, c, node)
	}
	c.observePoint(TimedBind, started, codeOfStatus(s))
	if s.OK() {
		p.postBind(ctx, c, node)
	}
	return s
}

// runPreBinds runs the PreBind plugins until one of them does not return success, and returns that
// plugin's status.
func (p *Profile) runPreBinds(ctx context.Context, c *Cycle, node string) *Status {
	for _, b := range p.Binding.PreBinds {
		if s := b.PreBind(ctx, c, node); !s.OK() {
			return withPlugin(s, b.Name())
		}
	}
	return nil
}

// runBinds runs the first Bind plugin that does not return Skip, and returns its status.
func (p *Profile) runBinds(ctx context.Context, c *Cycle, node string) *Status {
	for _, b := range p.Binding.Binds {
		switch s := b.Bind(ctx, c, node); {
		case s.Is(Skip):
		case !s.OK():
			return withPlugin(s, b.Name())
		default:
			return nil
		}
	}
	return Fail("Bind", errors.New("every bind plugin skipped the pod"))
}

func (p *Profile) postBind(ctx context.Context, c *Cycle, node string) {
	if len(p.Binding.PostBinds) == 0 {
		return
	}
	started := c.startPoint()
	for _, post := range p.Binding.PostBinds {
		post.PostBind(ctx, c, node)
	}
	c.observePoint(TimedPostBind, started, Success)
}

func withPlugin(s *Status, plugin string) *Status {
	if s.Plugin != "" {
		return s
	}
	n := *s
	n.Plugin = plugin
	return &n
}
