package node

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	kubeletv1beta1 "k8s.io/kubelet/config/v1beta1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/reservedspace"
)

// configzObjects are the objects of a node with cluster DNS.
type configzObjects struct{ agent.Objects }

func (configzObjects) Cluster() agent.Cluster { return agent.Cluster{Domain: "cluster.local"} }
func (configzObjects) Service(string, string) (*v1.Service, bool) {
	return &v1.Service{Spec: v1.ServiceSpec{ClusterIP: "10.96.0.10"}}, true
}

// decodeConfiguration decodes a configuration strictly, with the type of Kubernetes.
func decodeConfiguration(t *testing.T, fields map[string]any) (text string, out kubeletv1beta1.KubeletConfiguration) {
	t.Helper()
	raw, err := json.Marshal(fields)
	if err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(strings.NewReader(string(raw)))
	d.DisallowUnknownFields()
	if err := d.Decode(&out); err != nil {
		t.Fatalf("%v: %s", err, raw)
	}
	return string(raw), out
}

// The configuration has the values of the agent, in the fields of a KubeletConfiguration. F133
func TestKubeletConfiguration(t *testing.T) {
	cfg := &Config{Listen: ListenConfig{KubeletPort: 10250},
		Dirs: DirConfig{CgroupRoot: "/keelson", Logs: "/var/log/pods"},
		Node: ObjectConfig{MaxPods: 42, FailSwapOn: true, MemoryFloor: reservedspace.Percent(3),
			Taints: []v1.Taint{{Key: "k", Effect: v1.TaintEffectNoSchedule}}},
		Pods: PodConfig{PIDs: 4096, SeccompDefault: true, ResolvConf: "/etc/resolv.conf"}}
	text, got := decodeConfiguration(t, kubeletConfiguration(cfg, configzObjects{}))
	if got.Port != 10250 || got.CgroupRoot != "/keelson" || got.MaxPods != 42 || *got.PodPidsLimit != 4096 ||
		!*got.FailSwapOn || !*got.SeccompDefault || len(got.RegisterWithTaints) != 1 ||
		got.ClusterDomain != "cluster.local" || len(got.ClusterDNS) != 1 || got.ClusterDNS[0] != "10.96.0.10" ||
		got.ContainerLogMaxSize != "10Mi" ||
		*got.ContainerLogMaxFiles != 5 || got.CrashLoopBackOff.MaxContainerRestartPeriod.Minutes() != 1 {
		t.Errorf("%s", text)
	}
	for signal, want := range map[string]string{"memory.available": "3%", "nodefs.available": "10%",
		"nodefs.inodesFree": "5%"} {
		if got.EvictionHard[signal] != want {
			t.Errorf("threshold of %s: %s, want %s", signal, got.EvictionHard[signal], want)
		}
	}
}

// fillStrings sets all strings of a configuration, also in lists and maps, to their own path.
func fillStrings(v reflect.Value, path string, paths *[]string) {
	marker := "<" + path + ">"
	switch v.Kind() {
	case reflect.String:
		v.SetString(marker)
		*paths = append(*paths, path)
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() {
				fillStrings(v.Field(i), path+"."+f.Name, paths)
			}
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.String {
			v.Set(reflect.ValueOf([]string{marker}))
			*paths = append(*paths, path)
		}
	case reflect.Map:
		if v.Type() == reflect.TypeFor[map[string]string]() {
			v.Set(reflect.ValueOf(map[string]string{marker: marker}))
			*paths = append(*paths, path)
		}
	}
}

// /configz contains no secret: of all texts in the agent's configuration, it contains only those
// that this test lists. A new setting is therefore not shown by accident. F133
func TestConfigzHasNoSecret(t *testing.T) {
	var cfg Config
	var paths []string
	fillStrings(reflect.ValueOf(&cfg).Elem(), "Config", &paths)
	if len(paths) < 20 || cfg.Join.Token != "<Config.Join.Token>" {
		t.Fatalf("texts of the configuration: %q", paths)
	}
	text, _ := decodeConfiguration(t, kubeletConfiguration(&cfg, configzObjects{}))
	text = strings.NewReplacer(`\u003c`, "<", `\u003e`, ">").Replace(text)
	shown := map[string]bool{"Config.Dirs.Logs": true, "Config.Dirs.CgroupRoot": true, "Config.Pods.ClusterDNS": true,
		"Config.Pods.ResolvConf": true}
	for _, path := range paths {
		if got := strings.Contains(text, "<"+path+">"); got != shown[path] {
			t.Errorf("%s is shown: %v, want %v", path, got, shown[path])
		}
	}
}
