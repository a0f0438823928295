package server

import (
	"errors"

	"keelson.dev/keelson/controlplane/apiserver/audit"
	"keelson.dev/keelson/controlplane/apiserver/podsecurity"
	"keelson.dev/keelson/controlplane/scheduler"
)

// Check says what Run would refuse of a replica's settings, naming the flag, and of the files that they name but for those of
// authentication and authorization. In the data folder it looks for the address alone, where the settings have none, and nothing is changed.
func Check(cfg Config) error {
	cfg, unknown := cfg.addressed()
	_, placing := scheduler.LoadConfig(cfg.SchedulerConfig)
	_, security := podsecurity.Load(cfg.AdmissionConfig)
	_, policy := audit.LoadPolicy(cfg.Audit.PolicyFile)
	return errors.Join(unknown, cfg.check(), cfg.Audit.check(), placing, security, policy)
}
