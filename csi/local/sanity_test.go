package local

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"

	"keelson.dev/keelson/csi/privatemounts"
)

// sanityAccess says as what volumes are wanted: "mount" or "block".
const sanityAccess = "KEELSON_TEST_SANITY_ACCESS"

// F110: what the authors of CSI ask of every driver (csi-sanity), whole.
func TestSanity(t *testing.T) {
	privatemounts.Need(t)
	dir := t.TempDir()
	socket := filepath.Join(dir, "csi.sock")
	serve(t, filepath.Join(dir, "volumes"), socket)
	cfg := sanity.NewTestConfig()
	cfg.Address = "unix://" + socket
	cfg.TargetPath, cfg.StagingPath = filepath.Join(dir, "target"), filepath.Join(dir, "staging")
	cfg.TestVolumeSize, cfg.TestVolumeExpandSize = 32*mib, 48*mib
	cfg.IdempotentCount = 3
	if access := os.Getenv(sanityAccess); access != "" {
		cfg.TestVolumeAccessType = access
	}
	sanity.Test(t, cfg)
}
