package scheduler

import (
	"cmp"
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/config"
	"keelson.dev/keelson/controlplane/scheduler/extender"
	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/controlplane/scheduler/plugins"
)

// profile is how the pods of one schedulerName are placed.
type profile struct {
	*framework.Profile
	percentage int
}

// profiles are those served, by schedulerName. All sort the queue alike: any's QueueSort will do.
type profiles struct {
	byName map[string]*profile
	any    *framework.Profile
	shared *plugins.Shared // nil where the plugins were passed in
}

// forPod is the profile that the pod asks for; nil when it is another scheduler's.
func (p *profiles) forPod(pod *v1.Pod) *profile { return p.byName[schedulerOf(pod)] }

// schedulerOf is the name of the scheduler that the pod is for.
func schedulerOf(pod *v1.Pod) string { return cmp.Or(pod.Spec.SchedulerName, v1.DefaultSchedulerName) }

func singleProfile(p *framework.Profile) *profiles {
	return &profiles{byName: map[string]*profile{v1.DefaultSchedulerName: {Profile: p}}, any: p}
}

// newProfiles builds what the configuration says. Each profile has a handle of its own: plugins ask it for Fits.
// confirm is called before an extender binds.
func newProfiles(c *config.Config, newHandle func() *framework.Handle, confirm func(context.Context) error) (*profiles, error) {
	shared := plugins.NewShared()
	out := &profiles{byName: make(map[string]*profile), shared: shared}
	var extenders []framework.Extender
	for i := range c.Extenders {
		e, err := extender.New(c.Extenders[i])
		if err != nil {
			return nil, fmt.Errorf("extenders[%d].%w", i, err)
		}
		extenders = append(extenders, confirmedBinder{e, confirm})
	}
	for _, p := range c.Profiles {
		h := newHandle()
		h.Extenders = extenders
		layout, err := plugins.Build(h, shared, p)
		if err != nil {
			return nil, err
		}
		built, err := framework.NewProfileOf(layout)
		if err != nil {
			return nil, fmt.Errorf("%s.plugins: %w", p.Field, err)
		}
		built.Extenders = extenders
		h.Fits, out.any = built.Fits, built
		out.byName[p.SchedulerName] = &profile{built, p.Percentage}
	}
	return out, nil
}

// LoadConfig reads a file, "" for none, and says what is wrong with it, also with what it says of plugins.
func LoadConfig(path string) (*config.Config, error) {
	c, err := config.Load(path)
	if err != nil {
		return nil, err
	}
	if _, err := newProfiles(c, func() *framework.Handle { return &framework.Handle{} }, nil); err != nil {
		return nil, fmt.Errorf("scheduler configuration %s: %w", path, err)
	}
	return c, nil
}
