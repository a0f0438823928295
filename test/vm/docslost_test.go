package vm

import (
	"errors"
	"fmt"
)

// promoted takes the leader's power away for good, and waits until the standby has its vote.
func (c *cluster) promoted() error {
	if err := c.allReady(c.replicas...); err != nil {
		return err
	}
	s, err := c.status()
	if err != nil {
		return err
	}
	if s.Leader == "cp4" || c.all[s.Leader] == nil {
		return fmt.Errorf("leader %q", s.Leader)
	}
	c.all[s.Leader].cut()
	if err := c.ask(); err != nil {
		return err
	}
	if _, err := c.kctl("create", "configmap", "after-the-first-cut", "--from-literal=a=b"); err != nil {
		return err
	}
	err = within(long, func() error {
		now, err := c.status()
		if err != nil {
			return errors.Join(err, c.ask())
		}
		if cp4 := member(now, "cp4"); !cp4.Voter || cp4.Ready != "yes" || member(now, s.Leader).Name != "" {
			return fmt.Errorf("cp4 is %+v, %s is %+v, and the autopilot %+v", cp4, s.Leader, member(now, s.Leader), now.Autopilot)
		}
		if p := now.Autopilot; p == nil || len(p.Done) != 1 || p.Done[0].Dead != s.Leader || p.Done[0].Standby != "cp4" {
			return fmt.Errorf("the autopilot says %+v", p)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := c.lineSays("cp4 has the vote of "+s.Leader, "recover", "kctl cluster status", "site"); err != nil {
		return err
	}
	return c.serves()
}
