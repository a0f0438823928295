package recovery

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/raftstore/disk"
)

// ConvertLog changes the log store of this replica.
func ConvertLog(ctx context.Context, d datadir.Dir, to string, progress func(done, total uint64)) error {
	if to != string(disk.LogBolt) && to != string(disk.LogWAL) {
		return fmt.Errorf("--to %q: want %s or %s", to, disk.LogBolt, disk.LogWAL)
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
	if err := disk.Convert(ctx, conf.Disk(), disk.LogStoreKind(to), progress); err != nil {
		return err
	}
	return d.SaveLogStore(to)
}

// AddFamily gives a cluster of one family a second one: on the disk of a stopped replica, and on each replica in turn with
// the same ranges. Nodes get pod addresses of it, and Services that ask for it addresses, from when the leader has it; pods
// that run keep what they have, and new pods get both.
func AddFamily(d datadir.Dir, clusterCIDR, serviceCIDR string) (datadir.Cluster, error) {
	if d.Path == "" {
		return datadir.Cluster{}, errors.New("--data-dir: a replica needs a folder for its data")
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
			return cluster, nil // said again
		}
		return cluster, fmt.Errorf("the cluster has two families already: pods %s, Services %s", cluster.ClusterCIDR, cluster.ServiceCIDR)
	}
	if err := next.Validate(); err != nil {
		return cluster, err
	}
	if err := datadir.WriteJSON(filepath.Join(d.Path, datadir.ClusterFile), next); err != nil {
		return cluster, err
	}
	return next, nil
}
