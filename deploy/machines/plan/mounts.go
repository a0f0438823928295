package plan

import (
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// checkMounts adds findings for the machine h if a disk for Keelson's data is possibly not mounted.
// An installation would then write to the empty mount point and start a replica with empty data.
// After the disk is mounted, the replica would have its old data again, without its later raft log
// and votes. The script install.sh also refuses to install there.
func (j *inspector) checkMounts(h machines.Host, f machines.Facts) {
	const none = "take it out of /etc/fstab, or its unit out of /etc/systemd/system"
	begin, runs := "'kctl cluster up' again", false
	var units []string // enabled units; systemd does not start them when a disk is mounted later
	for _, r := range []machines.Role{machines.ControlPlane, machines.Worker} {
		if f.Enabled[r.UnitName()] {
			units = append(units, r.UnitName())
		}
		runs = runs || f.Active[r.UnitName()]
	}
	if len(units) > 0 {
		begin = "'systemctl start " + strings.Join(units, " ") + "', or " + begin
	}
	for _, path := range f.Unmounted {
		path = printable(path)
		what, mount := "a disk is to be mounted at "+path+" and is not: ", "'mount "+path+"' there, and "+begin
		switch {
		case lacksRole(h, f):
			j.addError(h.Name, what+"its data would be considered lost", mount+"; if it is no longer needed, "+none)
		case runs:
			j.addWarning(h.Name, what+"nothing is installed there, and when a daemon starts again systemd mounts it "+
				"over what lies there",
				"where what lies there is to stay, "+none+
					", or move it to the disk, with the daemons stopped and in place of what is on it; where it is of "+
					"no use, stop the daemons; then "+mount)
		default:
			j.addWarning(h.Name, what+"nothing is installed there, and the daemons do not start by themselves",
				mount+"; if it is no longer needed, "+none)
		}
	}
	if len(f.Unmounted) > 0 {
		return
	}
	const see = "see that no disk of its data waits to be mounted; else go on"
	if h.HasReplica() && f.ControlPlane != "" && !f.Replica && j.state.Known && j.state.isMember(h.Name) {
		j.addWarning(h.Name, "is a replica of the cluster, and its data directory is empty: 'up' would join it "+
			"again", see)
	}
	if _, known := j.state.Nodes[h.Name]; h.HasRole(machines.Worker) && f.Agent != "" && !f.Node && known {
		j.addWarning(h.Name, "is a node of the cluster, and its data directory is empty: 'up' would join it again", see)
	}
}
