package server

import (
	"errors"

	"keelson.dev/keelson/controlplane/apiserver/audit"
	"keelson.dev/keelson/controlplane/apiserver/podsecurity"
	"keelson.dev/keelson/controlplane/scheduler"
)

// Check says what Run would refuse of a replica's settings, naming the flag, and of the files that they name but for those of
// authentication and authorization. The data folder is not looked at, and nothing is changed.
func Check(cfg Config) error {
	_, placing := scheduler.LoadConfig(cfg.SchedulerConfig)
	_, security := podsecurity.Load(cfg.AdmissionConfig)
	_, policy := audit.LoadPolicy(cfg.Audit.PolicyFile)
	return errors.Join(cfg.check(), cfg.Audit.check(), placing, security, policy)
}
