package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// A plugin registers itself or is found in the registration directory. The node advertises its
// devices; unhealthy devices count toward capacity only. A changed list changes the node at once,
// and after the plugin has exited no device is allocatable. F92
func TestPluginsComeAndGo(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Grace = 3 * time.Second }) // long enough to be observed on a busy machine
	list := filepath.Join(r.dir, "list")
	put(t, list, "a,b,c!")
	for _, how := range []string{"", "--registry=" + r.cfg.Registration} {
		args := []string{"--list=" + list}
		if how != "" {
			args = append(args, how)
			put(t, list, "a,b,c!")
		}
		p := r.plugin("thing", args...)
		r.has(thing, 3, 2)
		put(t, list, "a!,b!,c,d,e,f")
		p.signal(t)
		r.has(thing, 6, 4)
		r.registered(p, true, 1) // it has devices before it receives the response
		p.once()
		r.has(thing, 6, 0)
		r.has(thing, 0, 0) // after the grace period
		if got := p.asked(t); got != "" {
			t.Errorf("%q: the plugin was asked: %s", how, got)
		}
		if err := os.Remove(p.log); err != nil {
			t.Fatal(err)
		}
	}
	// a plugin replaces a registered one
	r.plugin("one", "--devices=x,y")
	r.has(thing, 2, 2)
	r.plugin("two", "--devices=z")
	r.has(thing, 1, 1)
}

// A list, a response or a registration that exceeds the limits affects that plugin only. F92
func TestBadPlugins(t *testing.T) {
	r := newRig(t)
	r.plugin("good", "--resource=example.com/good")
	r.has("example.com/good", 2, 2)
	for _, mode := range []string{"huge", "bytes", "unnamed", "twice", "ends"} {
		name := "example.com/" + mode
		r.registered(r.plugin(mode, "--mode="+mode, "--resource="+name), true, 1)
		r.eventually(func() error {
			r.m.mu.Lock()
			defer r.m.mu.Unlock()
			if pool := r.m.resources[name]; r.m.pending[name] != nil || pool != nil && pool.plugin != nil {
				return fmt.Errorf("%s: %+v", mode, pool)
			}
			return nil
		})
		if _, allocatable := r.m.Resources(); !zero(allocatable, name) {
			t.Errorf("%s: %v", mode, allocatable)
		}
	}
	for _, mode := range []string{"old", "path"} {
		p := r.plugin(mode, "--mode="+mode, "--resource=example.com/"+mode)
		if err := p.Wait(); err == nil {
			t.Errorf("%s: it was not refused", mode)
		}
		r.registered(p, false, 1)
	}
	for mode, want := range map[string]string{
		"slow":     "device plugin of example.com/slow: Allocate: rpc error: code = DeadlineExceeded",
		"refuses":  "device plugin of example.com/refuses: Allocate: rpc error: code = Unknown desc = no no ",
		"short":    "device plugin of example.com/short: Allocate: responses for 0 containers",
		"relative": `device plugin of example.com/relative: Allocate: a mount: "etc" is not an absolute path`,
	} {
		name := "example.com/" + mode
		r.plugin(mode, "--mode="+mode, "--resource="+name)
		r.has(name, 2, 2)
		pod := podOf(mode, asks("c", 1, "example.com/good"), asks("d", 1, name))
		if r.m.cfg.AllocateLimit = 30 * time.Second; mode == "slow" {
			r.m.cfg.AllocateLimit = 3 * time.Second // enough time for the valid plugin, even on a busy machine
		}
		err := r.m.Allocate(t.Context(), pod)
		if err == nil || !strings.HasPrefix(err.Error(), want) || len(err.Error()) > 1024 {
			t.Errorf("%s: %v", mode, err)
		}
		if pods, err := r.m.Pods(); err != nil || len(pods) > 0 || len(r.m.usedDevices("example.com/good")) > 0 {
			t.Errorf("%s: all or none: pods %v have devices, %v", mode, pods, err)
		}
	}
	r.m.cfg.AllocateLimit = 30 * time.Second
	if err := r.m.Allocate(t.Context(), podOf("fine", asks("c", 2, "example.com/good"))); err != nil {
		t.Error(err)
	}
}

func zero(list v1.ResourceList, name string) bool {
	q := list[v1.ResourceName(name)]
	return q.IsZero()
}

// A plugin that sends new lists continuously changes the node ten times at once and then once per
// second. F92
func TestEndlessLists(t *testing.T) {
	r := newRig(t)
	news := r.m.Changes(t.Context())
	begin := time.Now()
	r.plugin("endless", "--mode=endless")
	for range 2 { // it has started, however long that took
		<-news
	}
	n := 2
	for over := time.After(3 * time.Second); ; {
		select {
		case <-news:
			n++
			continue
		case <-over:
		}
		break
	}
	if most := listsAtOnce + int(time.Since(begin)/listEvery) + 1; n > most {
		t.Errorf("%d changes, want %d at most", n, most)
	}
}

// Names must be those of extended resources, and their number is limited. F92
func TestNames(t *testing.T) {
	for name, fine := range map[string]bool{"example.com/thing": true, "thing": false, "": false,
		"kubernetes.io/thing": false, "a.kubernetes.io/x": false,
		"requests.example.com/x": false, "example.com/" + strings.Repeat("x", 64): false, "example.com/a/b": false,
		"EXAMPLE.com/x": false} {
		if err := checkResourceName(name); (err == nil) != fine {
			t.Errorf("%q: %v", name, err)
		}
	}
	r := newRig(t, func(c *Config) { c.QueryLimit, c.Grace = 10*time.Second, time.Millisecond })
	var err error
	r.eventually(func() error {
		_, err := r.m.startPlugin("example.com/r0", filepath.Join(r.dir, "none"), nil)
		return err
	})
	for i := range maxResources {
		if err == nil {
			_, err = r.m.startPlugin(fmt.Sprint("example.com/r", i), filepath.Join(r.dir, "none"), nil)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.m.startPlugin("example.com/more", filepath.Join(r.dir, "none"), nil); err == nil ||
		!strings.Contains(err.Error(), "64 device plugin resources") {
		t.Errorf("one too many: %v", err)
	}
}

// A pod gets devices of its own, and the same ones when the call is repeated. Init containers leave
// theirs to later containers; sidecars keep theirs. A request for more devices than exist gets
// none. F92
func TestAllocation(t *testing.T) {
	r := newRig(t)
	p := r.plugin("thing", "--devices=a,b,c,d!,e")
	r.has(thing, 5, 4)
	one := podOf("1", asks("init-1", 2), asks("side-1", 1), asks("init-2", 1), asks("x", 1), asks("y", 1))
	for range 2 {
		if err := r.m.Allocate(t.Context(), one); err != nil {
			t.Fatal(err)
		}
		if got, want := r.given(one), "init-1:a,b side-1:a init-2:b x:b y:c"; got != want {
			t.Errorf("devices %s, want %s", got, want)
		}
	}
	two := podOf("2", asks("x", 2))
	const lack = "requested number of devices unavailable for example.com/thing. Requested: 2, Available: 1"
	if err := r.m.Allocate(t.Context(), two); err == nil || err.Error() != lack || r.given(two) != "" {
		t.Errorf("%v, has %s", err, r.given(two))
	}
	if err := r.m.Allocate(t.Context(), podOf("no", asks("x", 1<<62))); err == nil {
		t.Error("more devices than there can be")
	}
	if err := r.m.Allocate(t.Context(), podOf("none", v1.Container{Name: "x"},
		asks("y", 1, "example.com/patched"))); err != nil {
		t.Errorf("what no plugin manages: %v", err)
	}
	if err := errors.Join(r.m.Release("1"), r.m.Release("1"), r.m.Allocate(t.Context(), two)); err != nil ||
		r.given(two) != "x:a,b" {
		t.Errorf("%v, has %s", err, r.given(two))
	}
	if got, want := p.asked(t), "allocate a,b; allocate a; allocate b; allocate b; allocate c; allocate a,b"; got !=
		want {
		t.Errorf("the plugin was asked\n%s, want\n%s", got, want)
	}
}

// The plugin's preferred devices are allocated; its preference for unavailable devices is ignored.
// F92
func TestPreference(t *testing.T) {
	r := newRig(t)
	p := r.plugin("thing", "--devices=a,b,c,d", "--prefer")
	r.has(thing, 4, 4)
	one := podOf("1", asks("init-1", 1), asks("x", 2))
	if err := r.m.Allocate(t.Context(), one); err != nil || r.given(one) != "init-1:d x:c,d" {
		t.Errorf("%v, has %s", err, r.given(one))
	}
	if got, want := p.asked(t),
		"prefer 1 of a,b,c,d with ; allocate d; prefer 2 of a,b,c,d with d; allocate c,d"; got != want {
		t.Errorf("the plugin was asked\n%s, want\n%s", got, want)
	}
	r.plugin("stranger", "--devices=a,b,c", "--prefer", "--mode=stranger", "--resource=example.com/odd")
	r.has("example.com/odd", 3, 3)
	if err := r.m.Allocate(t.Context(), podOf("2", asks("x", 1, "example.com/odd"))); err != nil {
		t.Error(err)
	}
	if used := r.m.usedDevices("example.com/odd"); len(used) != 1 || !used["c"] {
		t.Errorf("given %v", used)
	}
}

func TestPick(t *testing.T) {
	for _, c := range []struct{ chosen, preferred, free, want string }{
		{"", "", "a b c", "a b"}, {"z", "", "a b", "a z"}, {"", "c", "a b c", "a c"}, {"", "x c c", "a b c", "a c"},
		{"x y", "a", "a b", "x y"}, {"", "", "a", "a"},
	} {
		got := selectDevices(strings.Fields(c.chosen), 2, strings.Fields(c.preferred), strings.Fields(c.free))
		if strings.Join(got, " ") != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}

// The settings of a container, merged over resources. Its devices are prepared before each start if
// the plugin requires it. F92
func TestContainers(t *testing.T) {
	r := newRig(t)
	p := r.plugin("thing", "--prepare", "--mount=/opt/things:/things", "--cdi="+r.dir)
	r.plugin("zoo", "--resource=zoo.example.com/thing", "--devices=z", "--mount=/opt/zoo:/zoo")
	r.plugin("hot", "--resource=example.com/hot", "--prepare", "--mode=unprepared")
	for name, n := range map[string]int64{thing: 2, "zoo.example.com/thing": 1, "example.com/hot": 2} {
		r.has(name, n, n)
	}
	pod := podOf("1", asks("x", 1, thing, "zoo.example.com/thing"), asks("h", 1, "example.com/hot"),
		v1.Container{Name: "without"})
	if err := r.m.Allocate(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		got, err := r.m.Container(t.Context(), pod, "x")
		if err != nil {
			t.Fatal(err)
		}
		var all []string
		for _, e := range got.Envs {
			all = append(all, e.Key+"="+string(e.Value))
		}
		for _, d := range got.Mounts {
			all = append(all, fmt.Sprint(d.HostPath, ":", d.ContainerPath, d.Readonly))
		}
		for _, d := range got.Devices {
			all = append(all, d.HostPath+":"+d.ContainerPath+":"+d.Permissions)
		}
		for _, d := range got.CDI {
			all = append(all, d.Name)
		}
		all = append(all, fmt.Sprint(got.Annotations))
		if want := "THINGS=a /opt/things:/things" +
			"true /opt/zoo:/zootrue /dev/zero:/dev/thing-a:r /dev/zero:/dev/thing-z:r example.com/thing=a " +
			"map[example.com/thing:a zoo.example.com/thing:z]"; strings.Join(all, " ") != want {
			t.Errorf("container has\n%s, want\n%s", strings.Join(all, " "), want)
		}
	}
	if got, want := p.asked(t), "allocate a; prepare a; prepare a"; got != want {
		t.Errorf("the plugin was asked %s, want %s", got, want)
	}
	if got, err := r.m.Container(t.Context(), pod, "without"); err != nil ||
		len(got.Envs)+len(got.Mounts)+len(got.Devices) > 0 {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := r.m.Container(t.Context(), pod, "h"); err == nil || !strings.Contains(err.Error(), "it is too hot") {
		t.Errorf("a device that is not ready: %v", err)
	}
	p.once()
	r.has(thing, 2, 0)
	if _, err := r.m.Container(t.Context(), pod, "x"); !errors.Is(err, errPluginMissing) {
		t.Errorf("nobody is there who would prepare it: %v", err)
	}
}

// A restarted agent has all allocations; plugins register again by themselves; a pod that starts
// before they have done so waits for them. F92
func TestNewAgent(t *testing.T) {
	r := newRig(t, func(c *Config) { c.ReturnWait = 20 * time.Second })
	p := r.plugin("thing", "--devices=a,b")
	r.has(thing, 2, 2)
	r.registered(p, true, 1)
	one, two := podOf("1", asks("x", 1)), podOf("2", asks("x", 1))
	r.cluster.Put(one, two)
	if err := r.m.Allocate(t.Context(), one); err != nil {
		t.Fatal(err)
	}
	before, err := r.m.Container(t.Context(), one, "x")
	if err != nil {
		t.Fatal(err)
	}
	r.begin()
	if !r.m.Manages(thing) || r.m.Manages("example.com/other") {
		t.Error("which resources are plugins' is not known")
	}
	if err := r.m.Allocate(t.Context(), one); err != nil || r.given(one) != "x:a" {
		t.Errorf("%v: it had a device, and has %s", err, r.given(one))
	}
	if after, err := r.m.Container(t.Context(), one, "x"); err != nil || fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("%v: its container had %v and has %v", err, before, after)
	}
	if err := r.m.Allocate(t.Context(), two); err != nil || r.given(two) != "x:b" {
		t.Errorf("%v: has %s", err, r.given(two))
	}
	r.has(thing, 2, 2)
	r.registered(p, true, 2)
	if got, want := p.asked(t), "allocate a; allocate b"; got != want {
		t.Errorf("the plugin was asked %s, want %s", got, want)
	}
	pods, err := r.m.Pods()
	if err != nil || !slices.Equal(pods, []types.UID{"1", "2"}) {
		t.Errorf("pods %v, %v", pods, err)
	}
}

// A pod that starts while another one is terminating waits for its devices. F92
func TestDevicesOfAnEndingPod(t *testing.T) {
	r := newRig(t, func(c *Config) { c.ReturnWait = 20 * time.Second })
	r.plugin("thing", "--devices=a")
	r.has(thing, 1, 1)
	one, two := podOf("1", asks("x", 1)), podOf("2", asks("x", 1))
	r.cluster.Put(one)
	if err := r.m.Allocate(t.Context(), one); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	if err := r.m.Allocate(t.Context(), two); !errors.Is(err, errUnavailable) || time.Since(begin) > 10*time.Second {
		t.Errorf("who has it stays: %v", err)
	}
	ending := one.DeepCopy()
	ending.DeletionTimestamp = &metav1.Time{Time: time.Now()}
	r.cluster.Put(ending)
	news := r.m.Changes(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.m.Allocate(t.Context(), two) }()
	select {
	case err := <-done:
		t.Fatalf("it did not wait: %v", err)
	case <-news: // a call without reservations sends no notification
		t.Fatal("something changed")
	case <-time.After(100 * time.Millisecond):
	}
	if err := r.m.Release("1"); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil || r.given(two) != "x:a" {
		t.Errorf("%v: has %s", err, r.given(two))
	}
	// a call that is canceled does not wait
	ctx, cancel := context.WithCancel(t.Context())
	gone := two.DeepCopy()
	gone.DeletionTimestamp = &metav1.Time{Time: time.Now()}
	r.cluster.Put(gone)
	go func() { done <- r.m.Allocate(ctx, podOf("3", asks("x", 1))) }()
	cancel()
	if err := <-done; err == nil {
		t.Error("there are no devices")
	}
}

// The health of devices is that of their plugin. It is unknown for devices that the plugin does not
// list. F92
func TestHealth(t *testing.T) {
	r := newRig(t)
	list := filepath.Join(r.dir, "list")
	put(t, list, "a,b")
	p := r.plugin("thing", "--list="+list)
	r.has(thing, 2, 2)
	pod := podOf("1", asks("x", 2))
	if err := r.m.Allocate(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	is := func(want string) {
		t.Helper()
		r.eventually(func() error {
			var got []string
			for _, s := range r.m.Health("1")["x"] {
				for _, d := range s.Resources {
					got = append(got, fmt.Sprintf("%s/%s=%s", s.Name, d.ResourceID, d.Health))
				}
			}
			if strings.Join(got, " ") != want {
				return fmt.Errorf("health %v, want %s", got, want)
			}
			return nil
		})
	}
	is(thing + "/a=Healthy " + thing + "/b=Healthy")
	put(t, list, "a,b!")
	p.signal(t)
	is(thing + "/a=Healthy " + thing + "/b=Unhealthy")
	put(t, list, "b,c")
	p.signal(t)
	is(thing + "/a=Unknown " + thing + "/b=Healthy")
	p.once()
	is(thing + "/a=Unknown " + thing + "/b=Unknown")
	if r.m.Health("2") != nil {
		t.Error("a pod without devices")
	}
}

// Whatever pods start at the same time, no device is allocated to two of them, and a pod is
// rejected only if devices are missing. F92
func TestNoDeviceTwice(t *testing.T) {
	r := newRig(t)
	r.plugin("thing", "--devices=a,b,c,d,e,f,g", "--prefer")
	r.has(thing, 7, 7)
	for round := range 8 {
		var wg sync.WaitGroup
		var mu sync.Mutex
		owner, refused := map[string]string{}, 0
		for i := range 8 {
			wg.Go(func() {
				p := podOf(fmt.Sprint(i), asks("init-1", 1), asks("x", 1), asks("y", int64(1+(i+round)%2)))
				err := r.m.Allocate(t.Context(), p)
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					refused++
					if !errors.Is(err, errUnavailable) {
						t.Error(err)
					}
					return
				}
				r.m.mu.Lock()
				defer r.m.mu.Unlock()
				for _, c := range []string{"x", "y"} {
					for _, id := range r.m.pods[p.UID].containerDevices(c)[thing].IDs {
						if owner[id] != "" {
							t.Errorf("round %d: device %s is with pod %s and %s/%s", round, id, owner[id], p.UID, c)
						}
						owner[id] = string(p.UID)
					}
				}
			})
		}
		wg.Wait()
		if refused == 0 || len(r.m.usedDevices(thing)) != len(owner) {
			t.Errorf("round %d: %d of 8 refused; %d devices with pods, %d counted", round, refused, len(owner),
				len(r.m.usedDevices(thing)))
		}
		for i := range 8 {
			if err := r.m.Release(types.UID(fmt.Sprint(i))); err != nil {
				t.Fatal(err)
			}
		}
	}
}
