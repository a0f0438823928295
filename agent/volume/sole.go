package volume

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	v1 "k8s.io/api/core/v1"
)

// alone keeps a claim with access mode ReadWriteOncePod to one pod of this node: to the first that asks, until its
// volumes are unmounted. The mark STATE/volumes/UID/alone/CLAIM outlives the agent.
func (v *Volumes) alone(pod *v1.Pod, claim *v1.PersistentVolumeClaim) error {
	if !slices.Contains(claim.Spec.AccessModes, v1.ReadWriteOncePod) {
		return nil
	}
	if err := checkUID(claim.UID); err != nil {
		return fmt.Errorf("claim %s/%s: %w", claim.Namespace, claim.Name, err)
	}
	defer v.locks.Lock("alone\x00" + string(claim.UID))()
	pods, err := v.Pods()
	if err != nil {
		return err
	}
	mark := filepath.Join("alone", string(claim.UID))
	for _, other := range pods {
		if other == pod.UID {
			continue
		}
		_, err := os.Lstat(filepath.Join(v.podDir(other), mark))
		switch {
		case err == nil:
			return fmt.Errorf("persistentvolumeclaim \"%s/%s\" uses the ReadWriteOncePod access mode and is already in use by another pod",
				claim.Namespace, claim.Name)
		case !errors.Is(err, os.ErrNotExist):
			return fmt.Errorf("looking for other pods with claim %s/%s: %w", claim.Namespace, claim.Name, err)
		}
	}
	mark = filepath.Join(v.podDir(pod.UID), mark)
	if err := os.MkdirAll(filepath.Dir(mark), 0o750); err != nil {
		return err
	}
	return os.WriteFile(mark, nil, 0o600)
}
