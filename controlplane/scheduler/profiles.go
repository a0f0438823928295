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

// profile contains the plugins for the pods of one schedulerName, and the percentage of feasible
// nodes after which filtering stops.
type profile struct {
	*framework.Profile
	percentage int
	metrics    *profileMetrics // nil in a Trial, which measures nothing
}

// profiles contains the profiles of a scheduler by schedulerName. All of them have the same
// QueueSort plugin, because they share one queue.
type profiles struct {
	byName map[string]*profile
	any    *framework.Profile
	shared *plugins.SharedState // devices and volumes reserved by plugins of all profiles; nil if Config.Plugins is set
}

// forPod returns the profile for the pod's schedulerName, or nil if this scheduler has no such
// profile.
func (p *profiles) forPod(pod *v1.Pod) *profile { return p.byName[schedulerOf(pod)] }

// schedulerOf returns the schedulerName of the pod. If it is empty, the result is
// "default-scheduler".
func schedulerOf(pod *v1.Pod) string { return cmp.Or(pod.Spec.SchedulerName, v1.DefaultSchedulerName) }

func singleProfile(p *framework.Profile) *profiles {
	return &profiles{byName: map[string]*profile{v1.DefaultSchedulerName: {Profile: p}}, any: p}
}

// newProfiles builds the profiles of a configuration. It calls newHandle for each profile, because
// Handle.Fits runs the plugins of one profile. Before an extender binds a pod, confirm is called.
// It must return an error, which prevents the binding, if this replica is no longer the leader.
func newProfiles(c *config.Config, newHandle func() *framework.Handle, confirm func(context.Context) error) (
	*profiles, error,
) {
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
		out.byName[p.SchedulerName] = &profile{Profile: built, percentage: p.Percentage}
	}
	return out, nil
}

// LoadConfig reads the configuration file at path and checks it completely, including the plugins
// and their arguments. For an empty path it returns the default configuration.
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
