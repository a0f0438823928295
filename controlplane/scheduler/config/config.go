// Package config reads what an operator says of the scheduler: a file of the shape of Kubernetes'
// KubeSchedulerConfiguration (kubescheduler.config.k8s.io/v1). It is pure but for Load. What it takes has its effect,
// what it cannot bring about it refuses with the field and what to do, and what concerns how kube-scheduler runs as a
// process of its own, which this scheduler is not, it warns of.
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

// Bounds of what a file may say.
const (
	maxBytes    = 1 << 20
	maxProfiles = 32
)

// Config is what a file says.
type Config struct {
	Profiles []Profile
	// InitialBackoff and MaxBackoff of pods that fit nowhere; 0 = the scheduler's own.
	InitialBackoff, MaxBackoff time.Duration
	Extenders                  []file.Extender
	// Warnings are about fields that mean nothing here.
	Warnings []string
}

// Profile is how the pods of one schedulerName are placed.
type Profile struct {
	SchedulerName string
	Field         string // where the file says so, for errors
	// Percentage of the nodes that, once found to fit, are enough; 0 = a falling share.
	Percentage int
	Plugins    file.Plugins
	Args       Args
}

// Default is what holds without a file.
func Default() *Config {
	return &Config{Profiles: []Profile{{SchedulerName: v1.DefaultSchedulerName, Field: "profiles[0]"}}}
}

// Names are the schedulerNames that are served, sorted.
func (c *Config) Names() []string {
	var out []string
	for _, p := range c.Profiles {
		out = append(out, p.SchedulerName)
	}
	slices.Sort(out)
	return out
}

// Load reads a file; "" is Default.
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

// Parse reads what a file says. The error names the first field that is wrong.
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
		return nil, fmt.Errorf("apiVersion %q, kind %q: want %s, KubeSchedulerConfiguration", f.APIVersion, f.Kind, file.SchemeGroupVersion)
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

// decodeStrict decodes JSON by the exact names of fields, each once, and no others.
func decodeStrict(text []byte, into any) error {
	wrong, err := kjson.UnmarshalStrict(text, into)
	if err != nil {
		return err
	}
	if len(wrong) > 0 {
		return fmt.Errorf("%w: take it out, or mend its spelling", wrong[0])
	}
	return nil
}

// processFields words the fields that concern a process of its own.
func processFields(f *file.KubeSchedulerConfiguration) []string {
	var out []string
	for _, x := range []struct {
		is         bool
		field, why string
	}{
		{f.Parallelism != nil, "parallelism", "nodes are filtered one after the other, which what is counted change by change makes cheap"},
		{f.LeaderElection.LeaderElect != nil || f.LeaderElection.ResourceName != "" || f.LeaderElection.LeaseDuration.Duration != 0,
			"leaderElection", "the replica that leads the store schedules"},
		{f.ClientConnection.Kubeconfig != "" || f.ClientConnection.QPS != 0 || f.ClientConnection.Burst != 0 ||
			f.ClientConnection.ContentType != "" || f.ClientConnection.AcceptContentTypes != "",
			"clientConnection", "the scheduler is a part of the control plane and reaches the API within the process"},
		{f.EnableProfiling != nil || f.EnableContentionProfiling != nil, "enableProfiling", "the scheduler has no server of its own"},
		{f.DelayCacheUntilActive, "delayCacheUntilActive", "each replica knows the cluster before it leads"},
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
	}{{"podInitialBackoffSeconds", f.PodInitialBackoffSeconds, &c.InitialBackoff}, {"podMaxBackoffSeconds", f.PodMaxBackoffSeconds, &c.MaxBackoff}} {
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
		return 0, fmt.Errorf("%s: %d: want 0 to 100, where 0 is what suits the size of the cluster", field, *p)
	}
	return int(*p), nil
}

func (c *Config) addProfiles(f *file.KubeSchedulerConfiguration) error {
	global, err := checkPercentage("percentageOfNodesToScore", f.PercentageOfNodesToScore)
	if err != nil {
		return err
	}
	if len(f.Profiles) > maxProfiles {
		return fmt.Errorf("profiles: %d of them: want %d at most", len(f.Profiles), maxProfiles)
	}
	if len(f.Profiles) == 0 {
		f.Profiles = make([]file.KubeSchedulerProfile, 1)
	}
	for i := range f.Profiles {
		p, from := Profile{SchedulerName: v1.DefaultSchedulerName, Field: fmt.Sprintf("profiles[%d]", i), Percentage: global}, &f.Profiles[i]
		if from.SchedulerName != nil {
			p.SchedulerName = *from.SchedulerName
		}
		if err := checkName(p.SchedulerName); err != nil {
			return fmt.Errorf("%s.schedulerName: %w", p.Field, err)
		}
		if slices.Contains(c.Names(), p.SchedulerName) {
			return fmt.Errorf("%s.schedulerName: another profile is named %s: give each a name of its own", p.Field, p.SchedulerName)
		}
		if from.PercentageOfNodesToScore != nil {
			if p.Percentage, err = checkPercentage(p.Field+".percentageOfNodesToScore", from.PercentageOfNodesToScore); err != nil {
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

// checkName judges what spec.schedulerName of pods may be.
func checkName(name string) error {
	if reasons := validation.IsDNS1123Subdomain(name); len(reasons) > 0 {
		return fmt.Errorf("%q: %s", name, strings.Join(reasons, "; "))
	}
	return nil
}
