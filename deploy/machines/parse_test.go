package machines

import (
	"reflect"
	"slices"
	"strings"
	"testing"
)

const example = `# two lines in front
apiVersion: keelson.dev/v1
kind: Machines
name: prod
release: dist
init: {cluster-cidr: 10.1.0.0/16}
ssh: {user: admin, key: ~/.ssh/cluster, port: 2222}
controlplane: {store-quota: 4Gi, debug: true}
agent: {max-pods: 60, registry-mirror: ["docker.io=mirror.example.com"]}
hosts:
- {name: cp1, address: 192.0.2.11, roles: [controlplane], ssh: {address: 198.51.100.1, port: 22}}
- name: w1
  address: 192.0.2.21
  roles: [worker]
  labels: {disk: fast}
  taints: [dedicated=db:NoSchedule]
  agent: {max-pods: 20}
`

// The cluster file: defaults come from above, and what a host says itself counts.
func TestParse(t *testing.T) {
	c, err := Parse([]byte(example), "/etc/there", "/home/me")
	if err != nil {
		t.Fatal(err)
	}
	one := func(s string) Value { return Value{Text: []string{s}} }
	ssh := SSH{User: "admin", Port: 2222, Key: "/home/me/.ssh/cluster", KnownHosts: "/home/me/.ssh/known_hosts"}
	first, second := ssh, ssh
	first.Address, first.Port, second.Address = "198.51.100.1", 22, "192.0.2.21"
	quota := Settings{"store-quota": one(`"4Gi"`), "debug": one("true")}
	mirrors := Value{List: true, Text: []string{`"docker.io=mirror.example.com"`}}
	want := Cluster{Name: "prod", Release: "/etc/there/dist",
		Init: []string{"--cluster-cidr=10.1.0.0/16"}, Hosts: []Host{
			{Name: "cp1", Address: "192.0.2.11", Roles: []Role{ControlPlane}, SSH: first, ControlPlane: quota,
				Agent: Settings{"max-pods": one("60"), "registry-mirror": mirrors}},
			{Name: "w1", Address: "192.0.2.21", Roles: []Role{Worker}, SSH: second,
				Labels: map[string]string{"disk": "fast"}, Taints: []string{"dedicated=db:NoSchedule"},
				ControlPlane: quota, Agent: Settings{"max-pods": one("20"), "registry-mirror": mirrors}},
		}}
	if !reflect.DeepEqual(c, want) {
		t.Errorf("is\n%+v\nwant\n%+v", c, want)
	}
}

// What is wrong with a cluster file is said with the line and the key.
func TestParseRefuses(t *testing.T) {
	change := func(old, new string) string { return strings.Replace(example, old, new, 1) }
	for _, c := range []struct{ name, file, want string }{
		{"empty", "", "is empty"},
		{"a list", "[]", "line 1: the file: want lines"},
		{"no YAML", "a: [", "line"},
		{"two documents", example + "---\na: b\n", "more than one document"},
		{"another version", change("keelson.dev/v1", "keelson.dev/v2"), `apiVersion "keelson.dev/v2"`},
		{"another kind", change("Machines", "Cluster"), "kind: Machines"},
		{"unknown key", change("release:", "relaese:"),
			`line 5: unknown key "relaese" in the file: there are apiVersion`},
		{"unknown key of a host", change("labels:", "label:"), `line 15: unknown key "label" in hosts`},
		{"unknown key of ssh", change("port: 2222", "prot: 2222"), `line 7: unknown key "prot" in ssh`},
		{"key twice", change("name: prod", "kind: Machines"), "line 4: key kind is there twice: it stands in line 3"},
		{"port", change("port: 2222", "port: 65536"), `line 7: port: "65536": want a port`},
		{"no host", strings.Split(example, "hosts:")[0], "hosts is missing"},
		{"no control plane", change("[controlplane]", "[worker]"), "no host has the role controlplane"},
		{"role", change("[worker]", "[master]"), `line 14: roles: "master": want controlplane, standby or worker`},
		{"a standby that has a vote", change("[controlplane]", "[controlplane, standby]"),
			"line 11: host cp1: roles: a standby is a replica that waits for a vote"},
		{"standbys alone", change("[controlplane]", "[standby]"),
			"line 11: host cp1: is a standby, and no host has the role controlplane"},
		{"a standby by a setting", change("debug: true", "standby: true"),
			"line 8: standby does not stand here: it comes from the host's roles"},
		{"no role", change("  roles: [worker]\n", ""), "line 12: host w1: roles is missing"},
		{"name", change("name: w1", "name: W1"), `line 12: name: "W1": want small letters`},
		{"same name", change("name: w1", "name: cp1"), "line 11: host cp1: another host has this name"},
		{"same address", change("192.0.2.21", "192.0.2.11"), "line 12: host w1: address 192.0.2.11 is that of cp1"},
		{"address", change("192.0.2.21", "w1.example.com"),
			`line 12: host w1: address "w1.example.com": want the IP address`},
		{"loopback", change("192.0.2.21", "127.0.0.1"), "line 12: host w1: address"},
		{"label", change("{disk: fast}", "{disk: fa st}"), `line 15: labels: "disk": "fa st" is no label`},
		{"labels of no worker", change("roles: [controlplane]", "roles: [controlplane], labels: {a: b}"),
			"host cp1: labels and taints require the role worker"},
		{"the machine's own label", change("{disk: fast}", "{kubernetes.io/hostname: w9}"),
			"line 15: labels: kubernetes.io/hostname is set by the agent"},
		{"taint twice", change("[dedicated=db:NoSchedule]", "[dedicated=db:NoSchedule, dedicated=web:NoSchedule]"),
			"line 16: taints: \"dedicated=web:NoSchedule\": want"},
		{"taint", change("db:NoSchedule", "db:Never"), "line 16: taints"},
		{"setting from elsewhere", change("{max-pods: 20}", "{node-name: x}"),
			"line 17: node-name does not stand here: it comes from the host's name"},
		{"setting twice", change("{max-pods: 20}", "{max-pods: 20, max-pods: 20}"),
			"line 17: key max-pods is there twice"},
		{"setting of keys", change("{max-pods: 20}", "{max-pods: {a: b}}"),
			"line 17: max-pods: want a value or a list"},
		{"empty setting", change("{max-pods: 20}", "{max-pods: }"), "line 17: max-pods: want a value"},
		{"alias", change("{max-pods: 20}", "&a {max-pods: 20}") + "- *a\n", "hosts: want lines"},
		{"shell in init", change("10.1.0.0/16", "$(reboot)"), "line 6: init.cluster-cidr"},
		{"two lines", change("release: dist", `release: "a\nb"`), "line 5: release"},
		{"long text", change("release: dist", "release: "+strings.Repeat("a", maxText+1)), "bytes: want"},
		{"brackets", strings.Repeat("[", 20_000), "brackets"},
		{"large", strings.Repeat("#", maxFile+1), "at most"},
	} {
		if _, err := Parse([]byte(c.file), "/", "/root"); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v\nwant %q", c.name, err, c.want)
		}
	}
}

// Where there are standbys, replicas replace those that die, unless the file says otherwise; where there are none nothing is said of it.
func TestStandbysReplaceTheDead(t *testing.T) {
	standby := strings.Replace(example, "- name: w1\n",
		"- {name: cp4, address: 192.0.2.14, roles: [standby, worker]}\n- name: w1\n", 1)
	for _, c := range []struct {
		name, file string
		want       []string // of cp1, cp4 and w1
	}{
		{"no standby", example, []string{"", ""}},
		{"a standby", standby, []string{`"10m"`, `"10m"`, ""}},
		{"a time", strings.Replace(standby, "debug: true", "replace-dead-after: 1m", 1),
			[]string{`"1m"`, `"1m"`, `"1m"`}},
		{"never", strings.Replace(standby, "debug: true", "replace-dead-after: 0", 1), []string{"0", "0", "0"}},
		{"one has its own", strings.Replace(standby, "roles: [controlplane]",
			"roles: [controlplane], controlplane: {replace-dead-after: 2m}", 1), []string{`"2m"`, `"10m"`, ""}},
	} {
		cluster, err := Parse([]byte(c.file), "/", "/root")
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		var is []string
		for _, h := range cluster.Hosts {
			is = append(is, strings.Join(h.ControlPlane[ReplaceDead].Text, ""))
		}
		if !slices.Equal(is, c.want) {
			t.Errorf("%s: %q, want %q", c.name, is, c.want)
		}
	}
}

// No file makes the parser fail otherwise than with an error.
func FuzzParse(f *testing.F) {
	f.Add([]byte(example))
	f.Fuzz(func(t *testing.T, raw []byte) {
		c, err := Parse(raw, "/", "/root")
		if err == nil && len(c.HostsWithRole(ControlPlane)) == 0 {
			t.Error("a cluster without a control plane was taken")
		}
	})
}
