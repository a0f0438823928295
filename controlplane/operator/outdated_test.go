package operator

import (
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/api"
)

func TestOutdatedAlarms(t *testing.T) {
	s := api.ClusterStatus{FeatureLevel: 1, Members: []api.ClusterMember{
		// cp3 does not answer
		{Name: "cp1", Version: "v2", FeatureLevel: 1}, {Name: "cp2", Version: "v1"}, {Name: "cp3"},
	}}
	alarms := outdatedAlarms(s)
	if len(alarms) != 1 || alarms[0].Member != "cp2" ||
		alarms[0].Message != "cp2 runs release v1, which supports feature levels up to 0, "+
			"and the cluster stores forms of level 1" ||
		!strings.Contains(alarms[0].Remedy, "install the release of the other replicas") {
		t.Errorf("the alarms are %+v, want an alarm about cp2", alarms)
	}
	if s.FeatureLevel = 0; len(outdatedAlarms(s)) > 0 {
		t.Error("there is an alarm although all releases support level 0")
	}
}
