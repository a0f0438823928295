package pod

import (
	"fmt"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

// The host name of a pod is the same in its kernel and in its hosts file, whichever field sets it.
func TestOwnName(t *testing.T) {
	for name, c := range map[string]struct {
		change      func(*v1.Pod)
		host, hosts string
	}{
		"the pod's": {func(*v1.Pod) {}, "web-u1", "\tweb-u1\n"},
		"long":      {func(p *v1.Pod) { p.Name = strings.Repeat("a", 62) + "-b" }, strings.Repeat("a", 62), "\t" + strings.Repeat("a", 62) + "\n"},
		"hostname":  {func(p *v1.Pod) { p.Spec.Hostname = "db" }, "db", "\tdb\n"},
		"subdomain": {func(p *v1.Pod) { p.Spec.Hostname, p.Spec.Subdomain = "db", "s" }, "db", "\tdb.s.default.svc.c.l\tdb\n"},
		"as FQDN":   {func(p *v1.Pod) { p.Spec.Hostname, p.Spec.Subdomain, p.Spec.SetHostnameAsFQDN = "db", "s", ptr(true) }, "db.s.default.svc.c.l", "\tdb.s.default.svc.c.l\tdb\n"},
		"override": {func(p *v1.Pod) {
			p.Spec.Hostname, p.Spec.Subdomain, p.Spec.HostnameOverride = "db", "s", ptr("my.host")
		}, "my.host", "\tmy.host\n"},
		"all 64 bytes": {func(p *v1.Pod) { p.Spec.HostnameOverride = ptr(strings.Repeat("b", 64)) }, strings.Repeat("b", 64), "\t" + strings.Repeat("b", 64) + "\n"},
	} {
		p := simplePod("u1")
		p.Status.PodIPs = []v1.PodIP{{IP: "10.88.0.2"}}
		c.change(p)
		host, err := hostname(p, "c.l")
		if text := hostsText(p, "c.l"); err != nil || host != c.host || !strings.HasSuffix(text, "\n10.88.0.2"+c.hosts) {
			t.Errorf("%s: host %q, %v, want %q; hosts file\n%s", name, host, err, c.host, text)
		}
	}
}

// The termination messages of all containers together fit into 12 KiB. A mount's status reports how
// far the mount is read-only.
func TestStatusTellsOfMountsAndLastWords(t *testing.T) {
	p := simplePod("u1")
	p.Spec.Containers = nil
	o := Observed{Sandboxes: []Sandbox{{ID: "s", Ready: true}}}
	for i := range 6 {
		name := fmt.Sprintf("c%d", i)
		p.Spec.Containers = append(p.Spec.Containers, v1.Container{Name: name, VolumeMounts: []v1.VolumeMount{
			{Name: "v", MountPath: "/w"}, {Name: "v", MountPath: "/r", ReadOnly: true},
			{Name: "v", MountPath: "/rr", ReadOnly: true, RecursiveReadOnly: ptr(v1.RecursiveReadOnlyIfPossible)},
		}})
		c := Container{ID: name, Name: name, Sandbox: "s", State: Exited, ExitCode: 1, Message: strings.Repeat("ä", 2048)}
		if i == 0 {
			c.State = Running
		}
		o.Containers = append(o.Containers, c)
	}
	st := Status(Desired{Pod: p}, o, v1.PodStatus{}, Host{}, time.Now())
	total := 0
	for _, cs := range st.ContainerStatuses {
		for _, s := range []v1.ContainerState{cs.State, cs.LastTerminationState} {
			if s.Terminated != nil {
				total += len(s.Terminated.Message)
			}
		}
	}
	if total > maxMessages || total < 9<<10 {
		t.Errorf("%d bytes of last words", total)
	}
	var got []string
	for _, m := range st.ContainerStatuses[0].VolumeMounts {
		if m.RecursiveReadOnly != nil {
			got = append(got, m.MountPath+" "+string(*m.RecursiveReadOnly))
		}
	}
	if want := "/r Disabled, /rr Enabled"; strings.Join(got, ", ") != want {
		t.Errorf("mounts %q, want %q", got, want)
	}
}

// A pod on the host network cannot set network sysctls, because they would change the node.
func TestSysctlsOfTheNodeAreRefused(t *testing.T) {
	for _, c := range []struct {
		name         string
		network, ipc bool
		want         string
	}{
		{"net.ipv4.tcp_syncookies", false, false, ""},
		{"net.ipv4.tcp_syncookies", true, false, "SysctlForbidden"},
		{"kernel.shm_rmid_forced", true, false, ""},
		{"kernel.shm_rmid_forced", false, true, "SysctlForbidden"},
		{"kernel.msgmax", false, false, "SysctlForbidden"},
	} {
		p := simplePod("u1")
		p.Spec.HostNetwork, p.Spec.HostIPC = c.network, c.ipc
		p.Spec.SecurityContext = &v1.PodSecurityContext{Sysctls: []v1.Sysctl{{Name: c.name, Value: "1"}}}
		got := ""
		if s := Admit(p, nil, &v1.Node{}); s != nil {
			got = s.Reason
		}
		if got != c.want {
			t.Errorf("%+v: %q", c, got)
		}
	}
}
