package devices

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
)

// life is a scenario around a restore: pod p has the devices of claim "a", and the restored control
// plane has other allocations.
type life struct {
	had       []allotment // of claim a, for pod p
	old       bool        // recorded by an agent that did not store devices
	now       []allotment // devices of claim a in the restored store, for pod r; nil = none
	recreated bool        // another claim with the same name
	absent    bool        // the claim does not exist
	other     []allotment // of claim b, for pod q
	again     bool        // the agent restarts in between
	first     bool        // r starts before q
}

func (l life) String() string {
	return fmt.Sprintf("had %v (not noted %v); now %v (another claim %v, absent %v), another one has %v; the agent "+
		"starts again %v, pod of the same claim first %v", l.had, l.old, l.now, l.recreated, l.absent, l.other,
		l.again, l.first)
}

func dev(name, share string, admin bool) allotment {
	return allotment{Driver: "a.example.com", Pool: "w1", Device: name, Share: share, Admin: admin}
}

func given(name string, uid types.UID, all []allotment) *resourcev1.ResourceClaim {
	c := claimOf(name)
	c.UID = uid
	if all == nil {
		c.Status.Allocation = nil
		return c
	}
	for _, a := range all {
		r := resourcev1.DeviceRequestAllocationResult{Request: "r", Driver: a.Driver, Pool: a.Pool, Device: a.Device}
		if a.Share != "" {
			share := types.UID(a.Share)
			r.ShareID = &share
		}
		if a.Admin {
			r.AdminAccess = &a.Admin
		}
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, r)
	}
	return c
}

// clash reports whether two allocations conflict because they contain the same device. Shares of a
// device that the control plane has accounted for do not conflict.
func clash(a, b []allotment, booked bool) bool {
	for _, x := range a {
		for _, y := range b {
			if x.Device == y.Device && !x.Admin && !y.Admin &&
				(x.Share == "" || y.Share == "" || x.Share == y.Share || !booked) {
				return true
			}
		}
	}
	return false
}

// play runs one scenario. It reports whether no device was given to two claims and each claim has
// its devices in the end.
func (l life) play(t *testing.T, dir string, number int) bool {
	state, cluster := t.TempDir(), fake.NewCluster()
	agentOf := func() *Devices { return New(Config{Registration: dir, State: state, Objects: cluster}) }
	d, uid := agentOf(), types.UID(fmt.Sprintf("a-%d", number))
	d.folder.Scan(t.Context())
	was := given("a", uid, l.had)
	p := podOf("p", was)
	cluster.Put(was)
	if _, err := d.Prepare(t.Context(), p); err != nil {
		t.Errorf("before: %v: %s", err, l)
		return false
	}
	if l.old {
		unnote(t, filepath.Join(state, string(uid)+".json"), l.had)
		d = agentOf()
		d.folder.Scan(t.Context())
	}
	nowUID := uid
	if l.recreated {
		nowUID += "-recreated"
	}
	a, b := given("a", nowUID, l.now), given("b", types.UID(fmt.Sprintf("b-%d", number)), l.other)
	r, q := podOf("r", a), podOf("q", b)
	cluster.Put(a, b)
	if l.absent {
		cluster.Delete(a)
	}
	if l.again {
		d = agentOf()
		d.folder.Scan(t.Context())
	}
	booked := !l.recreated && !l.absent && slices.Equal(sorted(l.had), sorted(l.now))
	good := true
	try := func(pod *v1.Pod, mustWait bool, holders string) {
		_, err := d.Prepare(t.Context(), pod)
		if err == nil && mustWait || err != nil && !mustWait {
			good = false
			t.Errorf("pod %s beside %s: %v, want it to wait: %v: %s", pod.Name, holders, err, mustWait, l)
		}
		if err != nil && !strings.Contains(err.Error(), "pod-p") {
			good = false
			t.Errorf("the error of pod %s does not name the pod that it waits for: %v: %s", pod.Name, err, l)
		}
	}
	tries := []func(){func() { try(q, clash(l.had, l.other, booked), "p") }}
	if l.now != nil && !l.absent {
		same := func() { try(r, !l.recreated && !l.old && !booked || l.recreated && clash(l.had, l.now, false), "p") }
		if l.first {
			tries = append([]func(){same}, tries...)
		} else {
			tries = append(tries, same)
		}
	}
	for _, f := range tries {
		f()
	}
	if err := d.Release(t.Context(), &v1.Pod{ObjectMeta: p.ObjectMeta}); err != nil {
		t.Errorf("release: %v: %s", err, l)
		return false
	}
	for _, pod := range []*v1.Pod{q, r} {
		if pod == q || l.now != nil && !l.absent {
			try(pod, false, "nobody else")
		}
	}
	return good
}

func sorted(all []allotment) []allotment {
	return allocatedDevices(given("x", "x", all))
}

// unnote turns a record into one written by an agent that did not store the devices of claims.
func unnote(t *testing.T, file string, had []allotment) {
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var r claimRecord
	if err := json.Unmarshal(b, &r); err != nil {
		t.Fatal(err)
	}
	r.Allotted, r.Devices = nil, nil
	for _, a := range had {
		r.Devices = append(r.Devices, agent.ClaimedDevice{CDI: []string{"a.example.com/gpu=x"}, Driver: a.Driver,
			Pool: a.Pool, Device: a.Device, ShareID: a.Share})
	}
	if b, err = json.Marshal(r); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// After a restore, no device is prepared for a claim while pods of another claim have it on the
// node, whatever the control plane reports about both. A pod does not get the devices of an earlier
// allocation of its claim that other pods have. In the end every pod has its devices.
func TestNoDeviceIsOfTwoClaimsAfterARestore(t *testing.T) {
	dir := short(t)
	spawn(t, dir, "a.example.com", "")
	g0, g1, s1, s2, look := dev("g0", "", false), dev("g1", "", false), dev("g0", "s1", false), dev("g0", "s2", false),
		dev("g0", "", true)
	sets := [][]allotment{{g0}, {g1}, {g1, g0}, {s1}, {s2}, {look}}
	count, bad := 0, 0
	for i := range len(sets) * 2 * (2 + 2*len(sets)) * len(sets) {
		next := func(n int) (out int) { out, i = i%n, i/n; return out }
		l := life{had: sets[next(len(sets))], old: next(2) == 1}
		switch k := next(2 + 2*len(sets)); {
		case k == 0:
			l.absent = true
		case k > 1:
			l.now, l.recreated = sets[(k-2)/2], k%2 == 1
		}
		l.other = sets[next(len(sets))]
		l.again, l.first = count%2 == 1, count%4 > 1
		booked := !l.recreated && slices.Equal(sorted(l.had), sorted(l.now))
		switch {
		case clash(l.now, l.other, true):
			continue // no store allocates one device to two claims
		case l.old && (slices.Contains(l.had, look) || !booked && !l.recreated && l.now != nil):
			continue // such a record does not show admin access, and the current devices of its claim count too
		}
		count++
		if !l.play(t, dir, count) {
			if bad++; bad == 5 {
				t.Fatal("and so on")
			}
		}
	}
	t.Logf("%d lives", count)
}
