// Package config reads the scheduler's configuration file: a KubeSchedulerConfiguration
// (kubescheduler.config.k8s.io/v1). All functions but Load are pure. Every accepted field takes
// effect, with one exception: a field that concerns only kube-scheduler as a separate process
// causes a warning. A field that is not supported is an error that names the field and the remedy.
package config

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	file "k8s.io/kube-scheduler/config/v1"
	kjson "sigs.k8s.io/json"

	"keelson.dev/keelson/controlplane/api/decodelimits"
	"keelson.dev/keelson/internal/filewatch"
)

// Limits of a configuration file: its size in bytes and its number of profiles.
const (
	maxBytes    = 1 << 20
	maxProfiles = 32
)

// Config is the content of a scheduler configuration file.
type Config struct {
	Profiles []Profile
	// InitialBackoff and MaxBackoff are the bounds of the delay before an unschedulable pod is
	// tried again; 0 means the scheduler's default.
	InitialBackoff, MaxBackoff time.Duration
	Extenders                  []file.Extender
	// Warnings describe the fields of the file that have no effect.
	Warnings []string
}

// Profile is a profile of the configuration file: the plugins, and their arguments, for the pods
// with one schedulerName.
type Profile struct {
	SchedulerName string
	Field         string // path of the profile in the file, for error messages
	// Percentage is percentageOfNodesToScore: filtering stops when this percentage of the nodes
	// fits the pod.
	// 0 means a percentage that decreases with the number of nodes.
	Percentage int
	Plugins    file.Plugins
	Args       Args
}

// Default returns the configuration that applies without a configuration file.
func Default() *Config {
	return &Config{Profiles: []Profile{{SchedulerName: v1.DefaultSchedulerName, Field: "profiles[0]"}}}
}

// Names returns the schedulerNames of all profiles, sorted.
func (c *Config) Names() []string {
	var out []string
	for _, p := range c.Profiles {
		out = append(out, p.SchedulerName)
	}
	slices.Sort(out)
	return out
}

// Load reads the configuration file at path and checks it, except the names and order of plugins,
// which plugins.Build checks. For an empty path it returns Default.
func Load(path string) (*Config, error) {
	if path == "" {
		return Default(), nil
	}
	data, err := filewatch.Read(path, maxBytes)
	if err != nil {
		return nil, fmt.Errorf("scheduler configuration: %w", err)
	}
	c, err := Parse(data)
	if err != nil {
		return nil, fmt.Errorf("scheduler configuration %s: %w", path, err)
	}
	return c, nil
}

// Parse parses and checks the content of a configuration file. The error contains the path of the
// first invalid field.
func Parse(data []byte) (*Config, error) {
	if len(data) > maxBytes {
		return nil, fmt.Errorf("it is larger than %d bytes", maxBytes)
	}
	text, duplicates, err := decodelimits.FromYAMLStrict(data)
	if err = errors.Join(err, duplicates); err != nil {
		return nil, err
	}
	var f file.KubeSchedulerConfiguration
	if err := decodeStrict(text, &f); err != nil {
		return nil, err
	}
	if f.APIVersion != file.SchemeGroupVersion.String() || f.Kind != "KubeSchedulerConfiguration" {
		return nil, fmt.Errorf("apiVersion %q, kind %q: want %s, KubeSchedulerConfiguration", f.APIVersion, f.Kind,
			file.SchemeGroupVersion)
	}
	c := &Config{Extenders: f.Extenders, Warnings: processFields(&f)}
	if err := c.setBackoffs(&f); err != nil {
		return nil, err
	}
	if err := c.addProfiles(&f); err != nil {
		return nil, err
	}
	return c, c.checkExtenders()
}

// decodeStrict decodes the JSON text into the value to which target points. Field names must match
// exactly, including case. Duplicate and unknown fields are errors.
func decodeStrict(text []byte, target any) error {
	wrong, err := kjson.UnmarshalStrict(text, target)
	if err != nil {
		return err
	}
	if len(wrong) > 0 {
		return fmt.Errorf("%w: remove it or correct its spelling", wrong[0])
	}
	return nil
}

// processFields returns one warning for each field of the file that is set but has no effect here,
// because it concerns only kube-scheduler as a separate process.
func processFields(f *file.KubeSchedulerConfiguration) []string {
	var out []string
	for _, x := range []struct {
		is         bool
		field, why string
	}{
		{f.Parallelism != nil, "parallelism", "nodes are filtered sequentially, which incremental counts make cheap"},
		{f.LeaderElection.LeaderElect != nil || f.LeaderElection.ResourceName != "" ||
			f.LeaderElection.LeaseDuration.Duration != 0,
			"leaderElection", "the raft leader runs the scheduler"},
		{f.ClientConnection.Kubeconfig != "" || f.ClientConnection.QPS != 0 || f.ClientConnection.Burst != 0 ||
			f.ClientConnection.ContentType != "" || f.ClientConnection.AcceptContentTypes != "",
			"clientConnection", "the scheduler is part of the control plane and calls the API in the same process"},
		{f.EnableProfiling != nil || f.EnableContentionProfiling != nil, "enableProfiling",
			"the scheduler has no server of its own"},
		{f.DelayCacheUntilActive, "delayCacheUntilActive",
			"every replica keeps its cache up to date before it becomes the leader"},
	} {
		if x.is {
			out = append(out, x.field+" has no effect: "+x.why)
		}
	}
	return out
}

func (c *Config) setBackoffs(f *file.KubeSchedulerConfiguration) error {
	for _, x := range []struct {
		field string
		from  *int64
		to    *time.Duration
	}{{"podInitialBackoffSeconds", f.PodInitialBackoffSeconds, &c.InitialBackoff},
		{"podMaxBackoffSeconds", f.PodMaxBackoffSeconds, &c.MaxBackoff}} {
		if x.from == nil {
			continue
		}
		if *x.from < 1 || *x.from > 24*3600 {
			return fmt.Errorf("%s: %d: want 1 to 86400", x.field, *x.from)
		}
		*x.to = time.Duration(*x.from) * time.Second
	}
	if c.MaxBackoff != 0 && c.MaxBackoff < c.InitialBackoff {
		return fmt.Errorf("podMaxBackoffSeconds: %d: want podInitialBackoffSeconds or more", *f.PodMaxBackoffSeconds)
	}
	return nil
}

func checkPercentage(field string, p *int32) (int, error) {
	if p == nil {
		return 0, nil
	}
	if *p < 0 || *p > 100 {
		return 0, fmt.Errorf("%s: %d: want 0 to 100, where 0 depends on the size of the cluster", field, *p)
	}
	return int(*p), nil
}

func (c *Config) addProfiles(f *file.KubeSchedulerConfiguration) error {
	global, err := checkPercentage("percentageOfNodesToScore", f.PercentageOfNodesToScore)
	if err != nil {
		return err
	}
	if len(f.Profiles) > maxProfiles {
		return fmt.Errorf("profiles: %d profiles: want at most %d", len(f.Profiles), maxProfiles)
	}
	if len(f.Profiles) == 0 {
		f.Profiles = make([]file.KubeSchedulerProfile, 1)
	}
	for i := range f.Profiles {
		p, from := Profile{SchedulerName: v1.DefaultSchedulerName, Field: fmt.Sprintf("profiles[%d]", i),
			Percentage: global}, &f.Profiles[i]
		if from.SchedulerName != nil {
			p.SchedulerName = *from.SchedulerName
		}
		if err := checkName(p.SchedulerName); err != nil {
			return fmt.Errorf("%s.schedulerName: %w", p.Field, err)
		}
		if slices.Contains(c.Names(), p.SchedulerName) {
			return fmt.Errorf("%s.schedulerName: another profile is named %s: use a different name", p.Field,
				p.SchedulerName)
		}
		if from.PercentageOfNodesToScore != nil {
			if p.Percentage, err = checkPercentage(p.Field+".percentageOfNodesToScore",
				from.PercentageOfNodesToScore); err != nil {
				return err
			}
		}
		if from.Plugins != nil {
			p.Plugins = *from.Plugins
		}
		if p.Args, err = readArgs(p.Field, from.PluginConfig); err != nil {
			return err
		}
		c.Profiles = append(c.Profiles, p)
	}
	return nil
}

// checkName returns an error if name is not a valid schedulerName.
func checkName(name string) error {
	if reasons := validation.IsDNS1123Subdomain(name); len(reasons) > 0 {
		return fmt.Errorf("%q: %s", name, strings.Join(reasons, "; "))
	}
	return nil
}
