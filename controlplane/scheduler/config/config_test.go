package config

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

const head = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n"

// plugin is a file with arguments for one plugin.
func plugin(name, args string) string {
	return head + "profiles:\n- pluginConfig:\n  - {name: " + name + ", args: {" + args + "}}\n"
}

// All that is said arrives, and what means nothing here is warned of.
func TestParse(t *testing.T) {
	c, err := Parse([]byte(head + `
parallelism: 16
leaderElection: {leaderElect: true}
clientConnection: {kubeconfig: /etc/kubernetes/scheduler.conf}
percentageOfNodesToScore: 30
podInitialBackoffSeconds: 2
podMaxBackoffSeconds: 20
profiles:
- schedulerName: default-scheduler
- schedulerName: packed
  percentageOfNodesToScore: 70
  plugins:
    score: {disabled: [{name: NodeResourcesBalancedAllocation}], enabled: [{name: ImageLocality, weight: 4}]}
  pluginConfig:
  - name: NodeResourcesFit
    args:
      apiVersion: kubescheduler.config.k8s.io/v1
      kind: NodeResourcesFitArgs
      ignoredResources: [example.com/foo]
      scoringStrategy: {type: MostAllocated, resources: [{name: cpu, weight: 3}, {name: memory}]}
`))
	if err != nil {
		t.Fatal(err)
	}
	if got := c.Names(); !slices.Equal(got, []string{"default-scheduler", "packed"}) {
		t.Errorf("names %q", got)
	}
	if c.InitialBackoff != 2*time.Second || c.MaxBackoff != 20*time.Second {
		t.Errorf("backoffs %v, %v", c.InitialBackoff, c.MaxBackoff)
	}
	if len(c.Warnings) != 3 {
		t.Errorf("warnings %q", c.Warnings)
	}
	if c.Profiles[0].Percentage != 30 || c.Profiles[1].Percentage != 70 {
		t.Errorf("percentages %d, %d", c.Profiles[0].Percentage, c.Profiles[1].Percentage)
	}
	p := c.Profiles[1]
	fit := p.Args.Fit
	if fit == nil || !slices.Equal(fit.IgnoredResources, []string{"example.com/foo"}) ||
		fit.ScoringStrategy.Type != "MostAllocated" ||
		fit.ScoringStrategy.Resources[0].Weight != 3 || fit.ScoringStrategy.Resources[1].Weight != 1 {
		t.Errorf("arguments %+v", fit)
	}
	if len(p.Plugins.Score.Enabled) != 1 || *p.Plugins.Score.Enabled[0].Weight != 4 {
		t.Errorf("plugins %+v", p.Plugins.Score)
	}
	none, err := Parse([]byte(head))
	if err != nil || !slices.Equal(none.Names(), []string{v1.DefaultSchedulerName}) || len(none.Warnings) != 0 {
		t.Errorf("an empty file: %+v, %v", none, err)
	}
}

// parseRefusesCases are the cases of TestParseRefuses.
var parseRefusesCases = []struct{ text, want string }{
	{"", `apiVersion "", kind "": want kubescheduler.config.k8s.io/v1, KubeSchedulerConfiguration`},
	{strings.Replace(head, "v1\n", "v1beta3\n", 1), `apiVersion "kubescheduler.config.k8s.io/v1beta3"`},
	{head + "profils: []", `unknown field "profils": remove it or correct its spelling`},
	{head + "profiles: []\nprofiles: []", `"profiles" already set`},
	{head + "Profiles: []", `unknown field "Profiles"`},
	{head + "profiles: 3", "cannot unmarshal number"},
	{head + "percentageOfNodesToScore: 101", "percentageOfNodesToScore: 101: want 0 to 100"},
	{head + "profiles: [{percentageOfNodesToScore: -1}]",
		"profiles[0].percentageOfNodesToScore: -1: want 0 to 100"},
	{head + "podInitialBackoffSeconds: 0", "podInitialBackoffSeconds: 0: want 1 to 86400"},
	{head + "podInitialBackoffSeconds: 20\npodMaxBackoffSeconds: 3",
		"podMaxBackoffSeconds: 3: want podInitialBackoffSeconds or more"},
	{head + "profiles: [{}, {schedulerName: default-scheduler}]",
		"profiles[1].schedulerName: another profile is named default-scheduler"},
	{head + "profiles: [{schedulerName: A b}]", `profiles[0].schedulerName: "A b": a lowercase RFC 1123 subdomain`},
	{head + "profiles: [" + strings.Repeat("{},", 33) + "]", "profiles: 33 profiles: want at most 32"},
	{plugin("NodePorts", ""), `profiles[0].pluginConfig[0].name: plugin "NodePorts" takes no arguments here`},
	{plugin("DynamicResources", "filterTimeout: 0s"), "args.filterTimeout: 0s: want more than 0s and at most 10s"},
	{plugin("DynamicResources", "filterTimeout: 11s"),
		"args.filterTimeout: 11s: want more than 0s and at most 10s"},
	{plugin("DynamicResources", "bindingTimeout: 999ms"), "args.bindingTimeout: 999ms: want 1s to 24h"},
	{plugin("NodeResourcesFit", "foo: 1"), `profiles[0].pluginConfig[0].args: unknown field "foo"`},
	{plugin("NodeResourcesFit", "kind: OtherArgs"),
		"kind \"OtherArgs\": want kubescheduler.config.k8s.io/v1, NodeResourcesFitArgs"},
	{plugin("NodeResourcesFit", "ignoredResources: [cpu]"),
		`profiles[0].pluginConfig[0].args.ignoredResources[0]: "cpu": want the name of an extended resource`},
	{plugin("NodeResourcesFit", "ignoredResourceGroups: [a/b]"), `ignoredResourceGroups[0]: "a/b"`},
	{plugin("NodeResourcesFit", "scoringStrategy: {type: Best}"),
		`scoringStrategy.type: "Best": want LeastAllocated, MostAllocated or RequestedToCapacityRatio`},
	{plugin("NodeResourcesFit", "scoringStrategy: {resources: [{name: cpu, weight: 101}]}"),
		"scoringStrategy.resources[0].weight: 101: want 1 to 100"},
	{plugin("NodeResourcesFit", "scoringStrategy: {resources: [{name: cpu}, {name: cpu}]}"),
		"scoringStrategy.resources[1].name: cpu is listed twice"},
	{plugin("NodeResourcesFit", "scoringStrategy: {type: RequestedToCapacityRatio}"),
		"requestedToCapacityRatio: type RequestedToCapacityRatio needs a shape"},
	{plugin("NodeResourcesFit", "scoringStrategy: {requestedToCapacityRatio: {shape: [{utilization: 0}]}}"),
		"type LeastAllocated does not use it"},
	{plugin("NodeResourcesFit", "scoringStrategy: {type: RequestedToCapacityRatio, requestedToCapacityRatio: "+
		"{shape: [{utilization: 5}, {utilization: 5}]}}"),
		"shape[1].utilization: 5: want points in increasing order of utilization"},
	{plugin("NodeResourcesFit", "scoringStrategy: {type: RequestedToCapacityRatio, requestedToCapacityRatio: "+
		"{shape: [{utilization: 5, score: 11}]}}"),
		"shape[0].score: 11: want 0 to 10"},
	{plugin("NodeResourcesBalancedAllocation", "resources: [{name: cpu, weight: 2}]"),
		"resources[0].weight: 2: all resources have the same weight for balance"},
	{plugin("PodTopologySpread", "defaultConstraints: [{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: "+
		"DoNotSchedule}]"), "they require defaultingType: List"},
	{plugin("PodTopologySpread", "defaultingType: List, defaultConstraints: [{topologyKey: zone, "+
		"whenUnsatisfiable: DoNotSchedule}]"), "defaultConstraints[0].maxSkew: 0"},
	{plugin("PodTopologySpread", "defaultingType: List, defaultConstraints: [{maxSkew: 1, topologyKey: z, "+
		"whenUnsatisfiable: ScheduleAnyway, labelSelector: {}}]"),
		"defaultConstraints[0].labelSelector"},
	{plugin("InterPodAffinity", "hardPodAffinityWeight: 101"), "args.hardPodAffinityWeight: 101: want 0 to 100"},
	{plugin("NodeAffinity", "addedAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: "+
		"[]}}"), "want at least one"},
	{plugin("NodeAffinity", "addedAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: "+
		"[{matchExpressions: [{key: a, operator: Like}]}]}}"), "Like"},
	{plugin("DefaultPreemption", "minCandidateNodesPercentage: 101"),
		"minCandidateNodesPercentage: 101: want 0 to 100"},
	{plugin("DefaultPreemption", "minCandidateNodesPercentage: 0, minCandidateNodesAbsolute: 0"),
		"want one of them above 0"},
	{plugin("VolumeBinding", "bindTimeoutSeconds: -1"), "bindTimeoutSeconds: -1: want 0 to 86400"},
	{plugin("VolumeBinding", "shape: [{utilization: 0, score: 1}]"),
		"args.shape: scoring by volume size is not supported: leave it out"},
	{head + "extenders: [{urlPrefix: 'host:80', filterVerb: f}]",
		"extenders[0].urlPrefix: \"host:80\": want a URL"},
	{head + "extenders: [{urlPrefix: 'http://a:b@host', filterVerb: f}]",
		"extenders[0].urlPrefix: it contains a user"},
	{head + "extenders: [{urlPrefix: 'http://host'}]", "extenders[0].filterVerb: the extender has no verb"},
	{head + "extenders: [{urlPrefix: 'http://host', filterVerb: 'f?x'}]", "extenders[0].filterVerb: \"f?x\""},
	{head + "extenders: [{urlPrefix: 'http://host', prioritizeVerb: p}]", "extenders[0].weight: 0: want 1 to"},
	{head + "extenders: [{urlPrefix: 'http://host', filterVerb: f, weight: 3}]",
		"extenders[0].weight: 3: it applies to prioritizeVerb, which is not set"},
	{head + "extenders: [{urlPrefix: 'http://host', filterVerb: f, httpTimeout: 31s}]",
		"extenders[0].httpTimeout: 31s: want 0s"},
	{head + "extenders: [{urlPrefix: 'http://host', filterVerb: f, enableHTTPS: true}]",
		"extenders[0].urlPrefix: \"http://host\": want https://"},
	{head + "extenders: [{urlPrefix: 'https://host', filterVerb: f, tlsConfig: {certFile: /a}}]",
		"extenders[0].tlsConfig.certFile: want both"},
	{head + "extenders: [{urlPrefix: 'https://host', filterVerb: f, tlsConfig: {insecure: true, caFile: /a}}]",
		"extenders[0].tlsConfig.insecure"},
	{head + "extenders: [{urlPrefix: 'http://host', filterVerb: f, managedResources: [{name: cpu}]}]",
		"extenders[0].managedResources[0].name: \"cpu\""},
	{head + "extenders: [{urlPrefix: 'http://a', bindVerb: b}, {urlPrefix: 'http://c', bindVerb: b}]",
		"extenders[1].bindVerb: another extender binds already"},
	{head + "extenders: [" + strings.Repeat("{urlPrefix: 'http://a', filterVerb: f},", 17) + "]",
		"extenders: 17 extenders: want at most 16"},
	{head + "#" + strings.Repeat("x", maxBytes), "larger than 1048576 bytes"},
	{head + "profiles: &a [" + strings.Repeat("*a,", 9) + "]", "an alias refers to a node that contains it"},
}

// Each error names the field and the remedy.
func TestParseRefuses(t *testing.T) {
	for _, tt := range parseRefusesCases {
		_, err := Parse([]byte(tt.text))
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%.300s\nerror: %v\nwant: %s", tt.text, err, tt.want)
		}
		if err != nil && strings.Contains(err.Error(), "\n") && !strings.Contains(tt.want, "already set") {
			t.Errorf("more than a line: %v", err)
		}
	}
}

// A file is named in what is wrong with it, and read within bounds.
func TestLoad(t *testing.T) {
	if c, err := Load(""); err != nil || len(c.Profiles) != 1 {
		t.Errorf("without a file: %+v, %v", c, err)
	}
	path := filepath.Join(t.TempDir(), "scheduler.yaml")
	for text, want := range map[string]string{
		head + "profils: []":                       path + `: unknown field "profils"`,
		head + "#" + strings.Repeat("x", maxBytes): "larger than",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Load(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %s", err, want)
		}
	}
	if _, err := Load(t.TempDir()); err == nil {
		t.Error("a folder was read")
	}
}

// Nothing that a file may hold breaks the reader.
func FuzzParse(f *testing.F) {
	f.Add([]byte(head))
	f.Add([]byte(plugin("NodeAffinity",
		"addedAffinity: {preferredDuringSchedulingIgnoredDuringExecution: [{weight: 1}]}")))
	f.Add([]byte(plugin("PodTopologySpread", "defaultingType: List")))
	f.Fuzz(func(t *testing.T, data []byte) {
		if c, err := Parse(data); err == nil && len(c.Profiles) == 0 {
			t.Error("no profile, and no error")
		}
	})
}
