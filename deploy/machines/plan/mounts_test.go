package plan

import (
	"strings"
	"testing"
)

// A disk that is not mounted is not taken for one that is lost: nothing is installed over its mount point.
func TestJudgeMounts(t *testing.T) {
	made := func(w *world) {
		for _, s := range w.plan() {
			w.do(t, s)
		}
	}
	unmounted := func(host, path string) func(*world) {
		return func(w *world) {
			f := w.facts[host]
			f.Unmounted = append(f.Unmounted, path)
			w.facts[host] = f
		}
	}
	// empty is a machine that has its programs and settings, and nothing below /var/lib/keelson.
	empty := func(host string) func(*world) {
		return func(w *world) {
			f := w.facts[host]
			f.Replica, f.ReplicaWhole, f.Node, f.Admin, f.ClusterID, f.ClusterName, f.ReplicaCA, f.NodeCA = false,
				false, false, false, "", "", "", ""
			w.facts[host] = f
		}
	}
	down := func(host string) func(*world) {
		return func(w *world) { clear(w.facts[host].Active) }
	}
	again := func(host string) func(*world) {
		return func(w *world) { delete(w.state.Nodes, host); delete(w.state.Members, host) }
	}
	for _, c := range []struct {
		name   string
		damage []func(*world)
		want   string
	}{
		{"a new machine", []func(*world){unmounted("w1", "/var/lib/keelson")},
			"E w1 a disk is to be mounted at /var/lib/keelson and is not: its data would be considered " +
				"lost -> 'mount /var/lib/keelson' there, and 'kctl cluster up' again; if it is no longer needed"},
		{"a replica", []func(*world){made, empty("cp2"), unmounted("cp2", "/var/lib/keelson/controlplane")},
			"E cp2 a disk is to be mounted at /var/lib/keelson/controlplane and is not"},
		{"the only replicas", []func(*world){made, empty("cp1"), empty("cp2"), empty("cp3"), empty("w1"),
			unmounted("cp1", "/data"), func(w *world) {
				w.state = State{}
			}}, "E cp1 a disk is to be mounted at /data and is not"},
		{"a node", []func(*world){made, empty("w1"), unmounted("w1", "/var/lib/keelson")},
			"E w1 a disk is to be mounted"},
		{"one that runs without it", []func(*world){made, unmounted("w1", "/var/lib/keelson/images")},
			"W w1 a disk is to be mounted at /var/lib/keelson/images and is not: nothing is installed " +
				"there, and when a daemon starts again " +
				"systemd mounts it over what lies there -> where what lies there is to stay, take it out " +
				"of /etc/fstab, " +
				"or its unit out of /etc/systemd/system, or move it to the disk, with the daemons stopped and in " +
				"place of what is on it; " +
				"where it is of no use, stop the daemons; then 'mount /var/lib/keelson/images' there, and 'systemctl " +
				"start keelson-agent', or 'kctl cluster up' again"},
		{"one that is down since a boot", []func(*world){made, down("w1"), unmounted("w1", "/var/lib/keelson/images")},
			"W w1 a disk is to be mounted at /var/lib/keelson/images and is not: nothing is installed there, and the " +
				"daemons do not start by themselves -> 'mount /var/lib/keelson/images' there, and 'systemctl start " +
				"keelson-agent', or 'kctl cluster up' again; if it is no longer needed"},
		{"a replica that is down since a boot", []func(*world){made, empty("cp2"), down("cp2"),
			unmounted("cp2", "/var/lib/keelson/controlplane")},
			"E cp2 a disk is to be mounted at /var/lib/keelson/controlplane and is not: " +
				"its data would be considered lost -> 'mount /var/lib/keelson/controlplane' there, and " +
				"'systemctl start keelson-controlplane', or 'kctl cluster up' again; if it is no longer needed"},
		{"a replica whose disk is a new one", []func(*world){made, empty("cp2")},
			"W cp2 is a replica of the cluster, and its data directory is empty: 'up' would join it again -> " +
				"see that no disk"},
		{"a node whose disk is a new one", []func(*world){made, empty("w1")},
			"W w1 is a node of the cluster, and its data directory is empty"},
		{"those that were taken out", []func(*world){made, empty("cp2"), again("cp2"), empty("w1"), again("w1")}, ""},
		{"a join that was cut off", []func(*world){made, empty("cp2"), func(w *world) {
			f := w.facts["cp2"]
			f.Replica = true
			w.facts["cp2"] = f
		}}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(aCluster(3, 1))
			for _, change := range c.damage {
				change(w)
			}
			var all []string
			for _, one := range Inspect(w.cluster, w.seen(), w.release, w.state) {
				all = append(all, map[bool]string{true: "E ", false: "W "}[one.Blocking]+one.Machine+" "+one.What+
					" -> "+one.Remedy)
			}
			if said := strings.Join(all, "\n"); len(all) > 1 || c.want == "" && said != "" ||
				!strings.HasPrefix(said, c.want) {
				t.Errorf("said:\n%s\nwant:\n%s", said, c.want)
			}
		})
	}
	// docs/how-to/replace-a-replica.md describes how a lost disk is replaced by an empty one.
	w := newWorld(aCluster(3, 1))
	made(w)
	empty("cp2")(w)
	if steps := w.plan(); len(steps) != 1 || steps[0].Machine != "cp2" || steps[0].Do != ControlPlane ||
		steps[0].Start != Join {
		t.Errorf("a replica whose disk is a new one: %+v", steps)
	}
}
