package plan

import (
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// mounts judges whether what a machine has may be on a disk that is not mounted: installed over its mount point, it would begin anew,
// and come back as it was once the disk is mounted, without what it has promised the group since. install.sh refuses that by itself.
func (j *judge) mounts(h machines.Host, f machines.Facts) {
	const none = "take it out of /etc/fstab, or its unit out of /etc/systemd/system"
	begin, runs := "'kctl cluster up' again", false
	var units []string // that are down after a boot at which a disk came late: systemd does not try again
	for _, r := range []machines.Role{machines.ControlPlane, machines.Worker} {
		if f.Enabled[r.Unit()] {
			units = append(units, r.Unit())
		}
		runs = runs || f.Active[r.Unit()]
	}
	if len(units) > 0 {
		begin = "'systemctl start " + strings.Join(units, " ") + "', or " + begin
	}
	for _, path := range f.Unmounted {
		path = printable(path)
		what, mount := "a disk is to be mounted at "+path+" and is not: ", "'mount "+path+"' there, and "+begin
		switch {
		case lacks(h, f):
			j.grave(h.Name, what+"what is on it would be taken for gone", mount+"; where none is meant any more, "+none)
		case runs:
			j.light(h.Name, what+"nothing is installed there, and when a daemon starts again systemd mounts it over what lies there",
				"where what lies there is to stay, "+none+", or move it to the disk, with the daemons stopped and in place of what is on it; where it is of no use, stop the daemons; then "+mount)
		default:
			j.light(h.Name, what+"nothing is installed there, and the daemons do not start by themselves", mount+"; where none is meant any more, "+none)
		}
	}
	if len(f.Unmounted) > 0 {
		return
	}
	const see = "see that no disk of its data waits to be mounted; else go on"
	if h.Replica() && f.ControlPlane != "" && !f.Replica && j.state.Known && j.state.has(h.Name) {
		j.light(h.Name, "is a replica of the cluster, and nothing of its data is there: 'up' would have it join anew", see)
	}
	if _, known := j.state.Nodes[h.Name]; h.Is(machines.Worker) && f.Agent != "" && !f.Node && known {
		j.light(h.Name, "is a node of the cluster, and nothing of its data is there: 'up' would have it join anew", see)
	}
}
