package plan

import (
	"keelson.dev/keelson/deploy/machines"
)

// mounts judges whether what a machine has may be on a disk that is not mounted: installed over its mount point, it would begin anew,
// and come back as it was once the disk is mounted, without what it has promised the group since.
func (j *judge) mounts(h machines.Host, f machines.Facts) {
	for _, path := range f.Unmounted {
		path = printable(path)
		what, remedy := "a disk is to be mounted at "+path+" and is not", "'mount "+path+"' there; where none is meant any more, take it out of /etc/fstab, or its unit out of /etc/systemd/system"
		if lacks(h, f) {
			j.grave(h.Name, what+": what is on it would be taken for gone", remedy)
		} else {
			j.light(h.Name, what+": the daemons start again only once it is", remedy)
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
