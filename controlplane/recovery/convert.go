package recovery

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/raftstore/disk"
)

// ConvertLog converts the raft log of this stopped replica to format, which is bolt or wal. It
// calls progress with the number of converted entries and their total.
func ConvertLog(ctx context.Context, d datadir.Dir, format string, progress func(done, total uint64)) error {
	if format != string(disk.LogBolt) && format != string(disk.LogWAL) {
		return fmt.Errorf("--to %q: want %s or %s", format, disk.LogBolt, disk.LogWAL)
	}
	cluster, release, err := d.Open()
	if err != nil {
		return err
	}
	defer release()
	conf, err := d.OfflineStoreConfig(cluster)
	if err != nil {
		return err
	}
	if err := disk.Convert(ctx, conf.Disk(), disk.LogStoreKind(format), progress); err != nil {
		return err
	}
	return d.SaveLogStore(format)
}

// AddFamily adds a second IP family to a cluster with one family. clusterCIDR and serviceCIDR are
// the pod range and the Service range of the new family. It is called on each stopped replica in
// turn, with the same ranges. Once the leader runs with the new ranges, Nodes get pod CIDRs of the
// new family, and Services that request it get addresses. Running pods keep their addresses, and
// new pods get addresses of both families.
func AddFamily(d datadir.Dir, clusterCIDR, serviceCIDR string) (datadir.Cluster, error) {
	if d.Path == "" {
		return datadir.Cluster{}, errors.New("--data-dir: a replica needs a data directory")
	}
	release, err := d.Lock()
	if err != nil {
		return datadir.Cluster{}, err
	}
	defer release()
	cluster, _, err := d.Load()
	if err != nil {
		return cluster, err
	}
	pods, services := cluster.ClusterPrefixes(), cluster.ServicePrefixes()
	next := cluster
	next.ClusterCIDR = pods[0].String() + "," + clusterCIDR
	next.ServiceCIDR = services[0].String() + "," + serviceCIDR
	if len(pods) == 2 {
		if next.ClusterCIDR == cluster.ClusterCIDR && next.ServiceCIDR == cluster.ServiceCIDR {
			return cluster, nil // the cluster already has these ranges
		}
		return cluster, fmt.Errorf("the cluster already has two address families: pods %s, Services %s",
			cluster.ClusterCIDR,
			cluster.ServiceCIDR)
	}
	if err := next.Validate(); err != nil {
		return cluster, err
	}
	if err := datadir.WriteJSON(filepath.Join(d.Path, datadir.ClusterFile), next); err != nil {
		return cluster, err
	}
	return next, nil
}
